"""How workers are started from this pytest: its own arguments and folder, and what a worker needs besides."""

from __future__ import annotations

import pytest

from perfsuite.workers.local import Launch
from perfsuite.workers.protocol import WorkerConfig


def launch_of(config: pytest.Config, worker: WorkerConfig) -> Launch:
    """A worker's command, folder and output."""
    parameters, option = config.invocation_params, config.option
    first = ("--no-cov",) if config.pluginmanager.hasplugin("_cov") else ()
    if option.capture == "fd":  # what a library prints as it aborts would be lost with pytest's own file
        first = ("--capture=sys", *first)
    return Launch(
        args=(*first, *(str(each) for each in parameters.args)),
        directory=parameters.dir,
        worker=worker,
        show_output=option.capture == "no",
    )
