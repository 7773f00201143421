"""pytest's way in: the options, when perfsuite is active, and which plugin takes part in this process."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite.errors import PerfsuiteError
from perfsuite.settings import GPU_DEST, GPU_FLAG, MARKER_ARGUMENTS, OPTIONS

if TYPE_CHECKING:
    from perfsuite.settings import Settings
    from perfsuite.workers.torchrun import Torchrun
    from perfsuite.workers.torchrun_crew import Supervisors

GPU_HELP = "hardware to measure on: auto, cpu, a family (a100) or a SKU (a100-sxm4-80gb)"
WORKER_VARIABLE = "PERFSUITE_WORKER"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Every ``--perf-*`` option with its ini setting; ``--gpu`` is added later."""
    group = parser.getgroup("perfsuite", "performance regression suite")
    for option in OPTIONS:
        if option.parse is None:
            group.addoption(option.flag, action="store_true", default=False, dest=option.dest, help=option.help)
            parser.addini(option.dest, option.help.replace("%%", "%"), type="bool", default=False)
        else:
            group.addoption(option.flag, default=None, dest=option.dest, metavar=option.metavar, help=option.help)
            parser.addini(option.dest, option.help.replace("%%", "%"), type="string", default=None)
    parser.addini("perf_cases", "globs of the files whose bench_* functions are cases", type="args", default=[])
    parser.addini("perf_gpu", GPU_HELP, type="string", default=None)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: Sequence[str]
) -> Generator[None, Any, Any]:
    """Register ``--gpu`` once the conftests are loaded: a project that defines one of its own keeps it."""
    _forget_gpu_value(early_config, args)
    result = yield
    try:
        parser.addoption(GPU_FLAG, default=None, dest=GPU_DEST, metavar="NAME", help=GPU_HELP)
    except ValueError:
        return result
    return result


def _forget_gpu_value(early_config: pytest.Config, args: Sequence[str]) -> None:
    """Until ``--gpu`` is known, pytest takes its value for a path; take it out of the paths again.

    A path that is there and names no hardware stays: a project's own ``--gpu`` may be a flag.
    """
    paths = getattr(early_config.known_args_namespace, "file_or_dir", None)
    for flag, value in pairwise(args):
        if flag != GPU_FLAG or not paths or value not in paths:
            continue
        if not (early_config.invocation_params.dir / value).exists() or _names_hardware(value):
            paths.remove(value)


def _names_hardware(value: str) -> bool:
    from perfsuite.hardware.catalogue import load

    return value in ("auto", "cpu") or bool(load().find(value))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Take part as a worker, as the session's coordinator, or not at all."""
    arguments = ", ".join(f"{name}=..." for name in MARKER_ARGUMENTS)
    config.addinivalue_line("markers", f"perf({arguments}): how a case is judged")
    worker = os.environ.pop(WORKER_VARIABLE, None)
    if worker is not None:
        _configure_worker(config, worker)
    elif is_explicit(config) or config.getini("perf_cases"):
        _configure_session(config)


def _configure_worker(config: pytest.Config, text: str) -> None:
    """This process was started to measure."""
    import msgspec

    from perfsuite.collection import CollectionPlugin
    from perfsuite.workers.hooks import WorkerPlugin
    from perfsuite.workers.protocol import WorkerConfig

    config.addinivalue_line("markers", "smoke: a quick subset of the cases")
    config.pluginmanager.register(CollectionPlugin(config), "perfsuite-collection")
    config.pluginmanager.register(WorkerPlugin(msgspec.json.decode(text, type=WorkerConfig)), "perfsuite-worker")


def _configure_session(config: pytest.Config) -> None:
    """This process is a session's own."""
    from perfsuite.collection import CollectionPlugin
    from perfsuite.interop.pytest_benchmark import quiet_table
    from perfsuite.session import SessionPlugin, refuse_conflicts, settings_of
    from perfsuite.workers.torchrun import torchrun_of

    config.addinivalue_line("markers", "smoke: a quick subset of the cases")
    try:
        refuse_conflicts(config, explicit=is_explicit(config))
        settings = settings_of(config)
    except PerfsuiteError as error:
        raise pytest.UsageError(str(error)) from None
    place = torchrun_of()
    if place is not None and place.rank > 0:
        _configure_supervisor(config, settings, place)
        return
    quiet_table(config)
    supervisors = None if place is None else _supervisors(config, place)
    session = SessionPlugin(config, settings, explicit=is_explicit(config), supervisors=supervisors)
    config.pluginmanager.register(CollectionPlugin(config), "perfsuite-collection")
    config.pluginmanager.register(session, "perfsuite-session")


def _supervisors(config: pytest.Config, place: Torchrun) -> Supervisors:
    """This process is rank 0 of a user's torchrun: the others, which it will ask for ranks."""
    from perfsuite.workers.launching import launch_of
    from perfsuite.workers.torchrun_crew import Supervisors

    return Supervisors(place, partial(launch_of, config))


def _configure_supervisor(config: pytest.Config, settings: Settings, place: Torchrun) -> None:
    """This process is another rank of a user's torchrun."""
    from perfsuite.hardware.selection import device_of_rank
    from perfsuite.workers.launching import launch_of
    from perfsuite.workers.supervisor import SupervisorPlugin

    device = partial(device_of_rank, settings.gpu, place.local_rank)
    config.pluginmanager.register(SupervisorPlugin(place, partial(launch_of, config), device), "perfsuite-supervisor")


def is_explicit(config: pytest.Config) -> bool:
    """Whether ``--gpu`` or a ``--perf-*`` option was given on the command line."""
    if getattr(config.option, GPU_DEST, None) is not None:
        return True
    return any(getattr(config.option, option.dest, None) not in (None, False) for option in OPTIONS)
