"""A rank's place in a group that trains together, and the model that it builds there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perfsuite.errors import CaseError
from perfsuite.models import ModelShape
from perfsuite.workloads.parallel import Parallel
from perfsuite.workloads.tensors import SEED

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("data", "pipeline", "tensor")


@functools.cache
def _mesh(device_type: str, sizes: tuple[int, ...]) -> DeviceMesh:
    """Made once for all cases of a rank, since every mesh has process groups of its own that are never given back."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, sizes, mesh_dim_names=DIMENSIONS)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where this rank stands in ``mesh``, whose dimensions are `DIMENSIONS`, and what the ranks tell each other."""

    parallel: Parallel
    mesh: DeviceMesh

    def place(self, dimension: str) -> int:
        """This rank's number along a dimension."""
        return int(self.mesh.get_local_rank(dimension))

    @property
    def tells_loss(self) -> bool:
        """Whether this rank is the one of its replica whose loss counts: that of the last stage."""
        return self.place("tensor") == 0 and self.place("pipeline") == self.parallel.pipeline - 1

    def mean(self, loss: float) -> float:
        """The mean of the replicas' losses, on every rank. A collective call."""
        import torch
        from torch import distributed

        total = torch.tensor(loss / self.parallel.data_size if self.tells_loss else 0.0, dtype=torch.float64)
        distributed.all_reduce(total)
        return float(total)

    def gather(self, value: float) -> list[float]:
        """Every rank's value, in rank order. A collective call."""
        import torch
        from torch import distributed

        found = [torch.zeros((), dtype=torch.float64) for _ in range(self.parallel.ranks)]
        distributed.all_gather(found, torch.tensor(value, dtype=torch.float64))
        return [float(each) for each in found]

    def norm_groups(self) -> Iterator[torch.distributed.ProcessGroup]:
        """Over whose ranks a gradient's norm is to be added up: those that have different parameters."""
        if self.parallel.shards > 1:
            yield self.mesh.get_group("data")
        for name in ("pipeline", "tensor"):
            if getattr(self.parallel, name) > 1:
                yield self.mesh.get_group(name)


def layout_for(parallel: Parallel, device: str) -> Layout:
    """This rank's layout in the default process group; a CaseError where that is not of ``parallel.ranks`` ranks."""
    import torch
    from torch import distributed

    size = distributed.get_world_size() if distributed.is_initialized() else 1
    if size != parallel.ranks:
        raise CaseError(f"TrainStep: ranks={parallel.ranks} must be the {size} of the group; --perf-ranks sets them")
    sizes = (parallel.data_size, parallel.pipeline, parallel.tensor)
    return Layout(parallel=parallel, mesh=_mesh(torch.device(device).type, sizes))


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The whole model as one rank would build it: its sizes, what its tensors hold, whether it recomputes."""

    shape: ModelShape
    dtype: torch.dtype
    checkpoint: bool

    def on_meta(self) -> Any:
        """Its modules, whose tensors hold no numbers."""
        from perfsuite.workloads.modules.transformer import Transformer

        return Transformer(self.shape, device="meta", dtype=self.dtype, checkpoint=self.checkpoint)


Wrap = Callable[[Any], "nn.Module"]
"""From the divided model to what of it is trained; a pipeline's stage takes only some of its layers."""


def build_model(whole: Whole, layout: Layout, device: str, *, stage: Wrap | None = None) -> nn.Module:
    """This rank's part of the model on ``device``, with the numbers that one rank's model would start with.

    No rank ever holds more than its own part and one whole parameter.
    """
    parallel, model = layout.parallel, whole.on_meta()
    if parallel.tensor > 1:
        from perfsuite.workloads.modules.sharding import divide

        divide(model, parallel.local_shape(whole.shape), layout.mesh["tensor"])
    module: nn.Module = model if stage is None else stage(model)
    if parallel.shards > 1:
        _shard(module, layout)
    module.to_empty(device=device)
    if whole.shape.tied:
        model.head.weight = model.embedding.weight  # two tensors, once they are on a device
    _fill(module, whole, layout, device)
    return _replicated(module, layout, device) if parallel.replicates else module


def _shard(module: Any, layout: Layout) -> None:
    """FSDP2's usual wrapping: each block, then what is left."""
    from torch.distributed.fsdp import fully_shard

    for block in module.blocks:
        fully_shard(block, mesh=layout.mesh["data"])
    fully_shard(module, mesh=layout.mesh["data"])


def _replicated(module: nn.Module, layout: Layout, device: str) -> nn.Module:
    """DDP, whose gradients are views of its buckets."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(
        module,
        device_ids=None if torch.device(device).type == "cpu" else [torch.device(device)],
        process_group=layout.mesh.get_group("data"),
        bucket_cap_mb=layout.parallel.bucket_mib,
        gradient_as_bucket_view=True,
    )


def _fill(module: nn.Module, whole: Whole, layout: Layout, device: str) -> None:
    """Draw every parameter of the whole model in turn, and keep this rank's part of those that it has."""
    import torch

    from perfsuite.workloads.modules.transformer import drawn

    ours = dict(module.named_parameters())
    with torch.no_grad():
        for name, full in drawn(whole.on_meta(), SEED, device=device):
            if name in ours:
                target = local_tensors([ours[name]])[0]
                target.copy_(_part(name, full, whole.shape, layout))


def _part(name: str, full: torch.Tensor, shape: ModelShape, layout: Layout) -> torch.Tensor:
    """First the tensor-parallel part, then FSDP2's share of its rows; more ranks than rows leave some with none."""
    parallel = layout.parallel
    if parallel.tensor > 1:
        from perfsuite.workloads.modules.sharding import part_of

        full = part_of(name, full, shape, rank=layout.place("tensor"), ranks=parallel.tensor)
    if parallel.shards == 1:
        return full
    chunks, place = full.chunk(parallel.shards), layout.place("data")
    return chunks[place] if place < len(chunks) else full[:0]


def local_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What this rank holds of each."""
    from torch.distributed.tensor import DTensor

    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
