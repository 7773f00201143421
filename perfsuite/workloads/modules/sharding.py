"""A transformer whose matrices are divided among ranks (arXiv:1909.08053), by DTensor's redistribution.

Parameters stay plain tensors, one rank's part each, so that DDP and FSDP2 treat them as any others; they are DTensors
within each layer's forward pass alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from perfsuite.models import ModelShape
from perfsuite.workloads.modules.layers import Attention, GatedMlp, Mlp
from perfsuite.workloads.modules.transformer import Transformer


def _same(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """What every rank has alike; its gradient is the sum of all ranks'."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def _whole(x: Tensor) -> Tensor:
    """A DTensor as a plain tensor that every rank has alike: the sum of the ranks' parts."""
    assert isinstance(x, DTensor)
    local: Tensor = x.redistribute(placements=[Replicate()]).to_local()
    return local


class ColumnLinear(nn.Module):
    """A linear map of which each rank has an equal part of the outputs, whose input all ranks have alike.

    ``as_dtensor`` hands the output on as a DTensor, which the loss of a divided vocabulary needs.
    """

    def __init__(self, plain: nn.Linear, mesh: DeviceMesh, *, as_dtensor: bool = False) -> None:
        super().__init__()
        self.mesh, self.as_dtensor = mesh, as_dtensor
        self.weight = nn.Parameter(plain.weight.new_empty(plain.out_features // mesh.size(), plain.in_features))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out / ranks)."""
        weight = DTensor.from_local(self.weight, self.mesh, [Shard(0)], run_check=False)
        out = functional.linear(_same(x, self.mesh), weight)
        assert isinstance(out, DTensor)
        return out if self.as_dtensor else out.to_local()


class RowLinear(nn.Module):
    """A linear map of which each rank has an equal part of the inputs; the ranks' products are added up."""

    def __init__(self, plain: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(plain.weight.new_empty(plain.out_features, plain.in_features // mesh.size()))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in / ranks) to (..., out), on every rank."""
        part = DTensor.from_local(x, self.mesh, [Shard(x.ndim - 1)], run_check=False)
        weight = DTensor.from_local(self.weight, self.mesh, [Shard(1)], run_check=False)
        return _whole(functional.linear(part, weight))


class RowEmbedding(nn.Module):
    """An embedding of which each rank has an equal part of the vocabulary."""

    def __init__(self, plain: nn.Embedding, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(plain.weight.new_empty(plain.num_embeddings // mesh.size(), plain.embedding_dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """(...) ids to (..., width), on every rank."""
        weight = DTensor.from_local(self.weight, self.mesh, [Shard(0)], run_check=False)
        return _whole(functional.embedding(_same(tokens, self.mesh), weight))


def divide(model: Transformer, local: ModelShape, mesh: DeviceMesh) -> None:
    """Put divided layers in place of the model's; ``local`` is what one rank of the one-dimensional ``mesh`` has.

    The new parameters hold no numbers yet: `part_of` says which they are to be.
    """
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.shape = local
            module.qkv, module.out = ColumnLinear(module.qkv, mesh), RowLinear(module.out, mesh)  # type: ignore[assignment]
        elif isinstance(module, Mlp | GatedMlp):
            module.up, module.down = ColumnLinear(module.up, mesh), RowLinear(module.down, mesh)  # type: ignore[assignment]
    model.embedding = RowEmbedding(model.embedding, mesh)  # type: ignore[assignment] # all are called alike
    model.head = ColumnLinear(model.head, mesh, as_dtensor=True)  # type: ignore[assignment]


def is_divided(name: str) -> bool:
    """Whether `divide` divides the parameter of this name; norms and routers are whole on every rank."""
    return name.rsplit(".", 2)[-2] in ("qkv", "out", "up", "down", "embedding", "head")


def part_of(name: str, full: Tensor, shape: ModelShape, *, rank: int, ranks: int) -> Tensor:
    """One rank's part of the whole parameter ``full`` called ``name``.

    Of the projection to queries, keys and values it is whole heads of each, of a gated MLP's way up the same part of
    gate and up: a contiguous part would be heads of one kind, and a gate without its half.
    """
    if not is_divided(name):
        return full
    layer = name.rsplit(".", 2)[-2]
    if layer in ("out", "down"):
        return full.chunk(ranks, dim=1)[rank]
    pieces: tuple[Tensor, ...]
    if layer == "qkv":
        pieces = torch.split(full, [shape.attention_width, shape.kv_width, shape.kv_width])
    elif layer == "up" and shape.gated:
        pieces = full.chunk(2)
    else:
        pieces = (full,)
    return torch.cat([piece.chunk(ranks)[rank] for piece in pieces])
