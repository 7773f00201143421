"""The process group that a workload's ranks communicate in."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING

from perfsuite.errors import CaseError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BACKENDS = ("gloo", "nccl", "xccl")
PATIENCE = timedelta(hours=1)
"""Ranks that wait for one that hangs are ended by the coordinator, which knows how long is too long."""

_NEEDS = {"nccl": "cuda", "xccl": "xpu"}


def data_group(backend: str | None, device: str) -> ProcessGroup:
    """The default process group, or one of all its ranks with another ``backend``. A collective call.

    Where there is no default group, one of this process alone becomes it. A CaseError where torch has no such backend,
    or not for the device.
    """
    import torch
    from torch import distributed

    kind = torch.device(device).type
    if not distributed.is_available():
        raise CaseError("this torch is built without torch.distributed; install one that has it")
    if backend is not None and backend not in _available(kind):
        raise CaseError(
            f"backend={backend!r} is not there for {kind}; there is {', '.join(_available(kind)) or 'none'}"
        )
    if not distributed.is_initialized():
        _make_world_of_one(kind)
    world: ProcessGroup | None = distributed.group.WORLD
    if world is None:
        raise CaseError("torch.distributed has no default group though it is initialized")
    if backend is None or f"{kind}:{backend}" in distributed.get_backend_config(world).split(","):
        return world
    return _other_group(world, backend)


def _available(kind: str) -> tuple[str, ...]:
    """The backends of this torch that take tensors of a kind of device."""
    from torch import distributed

    return tuple(
        name
        for name in BACKENDS
        if _NEEDS.get(name, kind) == kind and getattr(distributed, f"is_{name}_available", lambda: False)()
    )


def _make_world_of_one(kind: str) -> None:
    """A default group without a port: nobody else is to find it."""
    from torch import distributed
    from torch._C._distributed_c10d import HashStore  # torch.distributed has it too, but not for type checkers

    there = _available(kind)
    if not there:
        raise CaseError(f"this torch has no backend for {kind}; install one with {' or '.join(BACKENDS)}")
    own = next((name for name in there if name in _NEEDS), there[0])
    distributed.init_process_group(f"{kind}:{own}", store=HashStore(), rank=0, world_size=1, timeout=PATIENCE)


@functools.cache
def _other_group(world: ProcessGroup, backend: str) -> ProcessGroup:
    """Of the same ranks; made once for all cases of a rank."""
    from torch import distributed

    ranks = distributed.get_process_group_ranks(world)
    made: ProcessGroup = distributed.new_group(ranks, backend=backend, timeout=PATIENCE)
    return made
