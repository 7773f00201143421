"""How a rank finds its coordinator, and joins the other ranks in torch's default process group."""

from __future__ import annotations

import os
from typing import Any

from msgspec.structs import replace

from perfsuite.workers.listener import LOOPBACK, connect
from perfsuite.workers.protocol import Channel, Here, Join, Store, WorkerConfig
from perfsuite.workloads.groups import PATIENCE

BACKENDS = {"cpu": "gloo", "xpu": "cpu:gloo,xpu:xccl"}
ON_CUDA = "cpu:gloo,cuda:nccl"
"""ROCm's devices are called ``cuda`` too, and its RCCL ``nccl``."""


def as_rank(config: WorkerConfig) -> WorkerConfig:
    """The configuration of this rank, whose numbers torch's elastic agent has put into the environment."""
    local_rank = int(os.environ["LOCAL_RANK"])
    return replace(config, rank=int(os.environ["RANK"]), device_index=config.device_index + local_rank)


def announce(config: WorkerConfig) -> Channel:
    """Connect to the coordinator and say which rank this is."""
    assert config.address is not None
    return connect(config.address, Here(rank=config.rank, pid=os.getpid(), token=config.token))


def join(config: WorkerConfig, channel: Channel) -> Any:
    """Make the default process group, by a store that rank 0 hosts; EOFError where the coordinator is gone.

    Nothing in it times out before the coordinator does, which knows how long is too long.
    """
    import torch.distributed as dist

    store: Any = None
    if config.rank == 0:
        store = _store(Join(host=LOOPBACK, port=0), config)
        channel.send(Store(port=store.port))
    told = channel.receive_join()
    dist.init_process_group(
        BACKENDS.get(config.backend, ON_CUDA),
        store=store or _store(told, config),
        rank=config.rank,
        world_size=config.ranks,
        timeout=PATIENCE,
    )
    return dist.group.WORLD


def in_world(world: Any) -> bool:
    """Whether torch's default process group is still this one."""
    import torch.distributed as dist

    return dist.is_initialized() and dist.group.WORLD is world


def _store(place: Join, config: WorkerConfig) -> Any:
    """torch's store, hosted by rank 0."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch leaves it unexported

    return TCPStore(place.host, place.port, config.ranks, config.rank == 0, timeout=PATIENCE, wait_for_workers=False)


def with_own_uuid(config: WorkerConfig) -> WorkerConfig:
    """The configuration with this rank's device in place of the first rank's, where NVML knows them."""
    if config.uuid is None or int(os.environ["LOCAL_RANK"]) == 0:
        return config
    import torch

    return replace(config, uuid=f"GPU-{torch.cuda.get_device_properties(config.device_index).uuid}")
