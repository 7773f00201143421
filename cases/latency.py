"""What a call of the framework costs, where the work itself is next to nothing."""

import pytest

from perfsuite import Launch

CHAINS = [
    pytest.param("add", 1, id="add-1"),
    pytest.param("add", 64, marks=pytest.mark.smoke, id="add-64"),
    pytest.param("add", 1024, id="add-1024"),
    pytest.param("linear", 64, id="linear-64"),
    pytest.param("allocate", 64, id="allocate-64"),
]


@pytest.mark.parametrize(("op", "chain"), CHAINS)
def bench_launch(op, chain):
    return Launch(op=op, chain=chain, dtype="fp32")
