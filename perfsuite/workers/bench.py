"""The device as one worker holds it, prepared once: threads, the allocator, the clock."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from perfsuite.hardware.catalogue import load
from perfsuite.measure.bench import Bench
from perfsuite.measure.clock import clock_for
from perfsuite.measure.group import Group, GroupClock
from perfsuite.workers.protocol import WorkerConfig
from perfsuite.workloads.base import Target

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER_TRIM_BYTES = 2**31 - 1


def cpu_environment(threads: int) -> dict[str, str]:
    """What a worker on a CPU has to find in its environment when it starts: threads, and huge pages from glibc.

    Which small pages a process happens to get moved a 64 MiB copy by 5 % from one process to the next; with huge pages,
    which numpy asks for anyway, it was 1 %.
    """
    tunables = [each for each in (os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1") if each]
    return {
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        "GLIBC_TUNABLES": ":".join(tunables),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # others would compete with the case for the cores
    }


def prepare(config: WorkerConfig, group: Group | None = None) -> Bench:
    """Import torch, hold it to the configured threads, and describe the device; ``group`` measures together."""
    import torch

    if config.backend == "cpu":
        torch.set_num_threads(config.threads)
        keep_pages()
    else:
        (torch.xpu if config.backend == "xpu" else torch.cuda).set_device(config.device_index)
    row = load().by_sku(config.sku)
    clock = clock_for(config.backend, threads=config.threads)
    if group is not None:
        clock = GroupClock(clock, group, on_device=config.backend != "cpu")
    return Bench(
        torch_device=torch_device(config),
        target=Target(backend=config.backend, sku=config.sku, compute_capability=config.compute_capability),
        clock=clock,
        hardware=row.per_torch_device() if row else None,
        l2_bytes=config.l2_bytes,
        read_device_conditions=_conditions_reader(config),
        group=group,
    )


def torch_device(config: WorkerConfig) -> str:
    """torch's name of the device (ROCm's devices are called ``cuda`` too)."""
    if config.backend == "cpu":
        return "cpu"
    return f"{'xpu' if config.backend == 'xpu' else 'cuda'}:{config.device_index}"


def keep_pages() -> None:
    """Tell glibc's allocator to keep freed pages, so that a fresh output does not fault them in again every call."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM_BYTES)


def _conditions_reader(config: WorkerConfig) -> Callable[[], dict[str, Any]] | None:
    """How to read clocks, power, temperature and throttling of this device; None where NVML has no part in it."""
    return partial(_device_conditions, config.uuid) if config.uuid else None


def _device_conditions(uuid: str) -> dict[str, Any]:
    """The reading as plain values, with ``disturbed`` where it spoils an attempt."""
    import msgspec

    from perfsuite.hardware.conditions import read_nvml_conditions

    conditions = read_nvml_conditions(uuid)
    reasons = [f"the GPU was held back: {', '.join(conditions.slowdowns)}"] if conditions.slowdowns else []
    if conditions.foreign_processes:
        reasons.append(f"{conditions.foreign_processes} other process(es) computed on the GPU")
    return {**msgspec.to_builtins(conditions), "disturbed": "; ".join(reasons) or None}
