"""What every test gets: pytester, the same hypothesis examples each time, none of the caller's settings."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

pytest_plugins = ["pytester"]

# Two processes run tests on two cores: torch's second thread in each would only wait for its turn.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONGEST = (
    "test_faults.py",
    "test_ranks.py",
    "test_session.py",
    "test_parallel.py",
    "test_torchrun.py",
    "test_workers.py",
    "test_modes.py",
    "test_cli_baselines.py",
)
"""Files of whole sessions, begun first, so that no process is left with one at the end."""

# Derandomized: a red build means a change in the code, not a new seed. No deadline: a runner may stall.
settings.register_profile("perfsuite", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("perfsuite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(autouse=True)
def _isolated_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # Inner sessions are not xdist's: pytest-benchmark would switch itself off in them.
    for name in [name for name in os.environ if name.startswith(("PERFSUITE_", "PYTEST_XDIST_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
