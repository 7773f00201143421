"""What every test gets: pytester, the same hypothesis examples each time, none of the caller's settings."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

pytest_plugins = ["pytester"]

# Derandomized: a red build means a change in the code, not a new seed. No deadline: a runner may stall.
settings.register_profile("perfsuite", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("perfsuite")


@pytest.fixture(autouse=True)
def _isolated_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # Inner sessions are not xdist's: pytest-benchmark would switch itself off in them.
    for name in [name for name in os.environ if name.startswith(("PERFSUITE_", "PYTEST_XDIST_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
