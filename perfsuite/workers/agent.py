"""A process that runs torch's elastic agent, which starts the ranks, and tells the coordinator how they ended."""

from __future__ import annotations

import logging
import os
import sys

import msgspec

AGENT_VARIABLE = "PERFSUITE_AGENT"
"""Tells a rank which process has started it."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent is told: how many ranks to start, with which command, where torch may keep its files, and the
    descriptor to report on."""

    ranks: int
    command: list[str]
    folder: str
    report_fd: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How ranks ended: exit codes, or less the number of a signal, by rank; ``error`` is why none could start."""

    codes: dict[int, int] = {}
    error: str | None = None


def main() -> None:
    """Start the ranks, wait until they have ended, and report."""
    order = msgspec.json.decode(sys.argv[1], type=Order)
    os.set_inheritable(order.report_fd, False)
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    logging.disable(logging.CRITICAL)  # how ranks end is told by the coordinator
    report = _run(order)
    with os.fdopen(order.report_fd, "wb") as pipe:
        pipe.write(msgspec.json.encode(report))


def _run(order: Order) -> Report:
    """The ranks from their start to their end; nothing is restarted."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=order.ranks,
        run_id="perfsuite",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=order.folder),
    )
    try:
        elastic_launch(config, order.command[0])(*order.command[1:])
    except ChildFailedError as error:
        return Report(codes={int(rank): failure.exitcode for rank, failure in error.failures.items()})
    except Exception as error:
        return Report(error=f"{type(error).__name__}: {error}".splitlines()[0])
    return Report()
