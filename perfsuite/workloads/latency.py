"""What calling the framework costs: operations too small for their work to matter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from perfsuite.dtypes import dtype_of
from perfsuite.errors import CaseError
from perfsuite.flops import matmul_flops
from perfsuite.workloads.base import Step, Work, Workload, plain_float, positive_int
from perfsuite.workloads.tensors import random_source, random_tensor

if TYPE_CHECKING:
    import torch

OPS = ("add", "linear", "allocate")
WIDTH = 64
"""Features of the small linear layer."""


@dataclass(frozen=True, kw_only=True)
class Launch(Workload):
    """``chain`` eager calls, each on the result of the one before.

    ``add`` adds one to a single number, ``linear`` is a layer of 64 by 64 on one row, ``allocate`` makes an empty
    tensor of one element.
    """

    kind = "launch"
    metric = "latency_us"

    op: str = "add"
    chain: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        plain_float("Launch", self.dtype)
        positive_int("Launch", "chain", self.chain)
        if self.op not in OPS:
            raise CaseError(f"Launch: op={self.op!r} must be one of {', '.join(OPS)}")

    def work(self) -> Work:
        """The chain's first input, its weight and its result; calls are what is measured, not bytes."""
        linear = self.op == "linear"
        elements = {"add": 2, "linear": WIDTH * (WIDTH + 2), "allocate": 1}[self.op]
        return Work(
            flops=self.chain * matmul_flops(m=1, n=WIDTH, k=WIDTH) if linear else 0,
            nbytes=elements * dtype_of(self.dtype).itemsize,
            calls=self.chain,
        )

    def memory_bytes(self) -> int | None:
        """A few kilobytes."""
        return self.work().nbytes

    def build(self, device: str) -> Step:
        """A loop in Python, as eager code has it."""
        source = random_source(device)
        if self.op == "linear":
            # Scaled so that the numbers keep their size along the chain.
            weight = random_tensor((WIDTH, WIDTH), self.dtype, source) / WIDTH**0.5
            return partial(_linear_chain, random_tensor((1, WIDTH), self.dtype, source), weight, self.chain)
        x = random_tensor((1,), self.dtype, source)
        return partial(_add_chain if self.op == "add" else _allocate_chain, x, self.chain)


def _add_chain(x: torch.Tensor, chain: int) -> torch.Tensor:
    for _ in range(chain):
        x = x + 1.0
    return x


def _linear_chain(x: torch.Tensor, weight: torch.Tensor, chain: int) -> torch.Tensor:
    from torch.nn import functional

    for _ in range(chain):
        x = functional.linear(x, weight)
    return x


def _allocate_chain(x: torch.Tensor, chain: int) -> tuple[int, ...]:
    for _ in range(chain):
        x = x.new_empty(1)
    return tuple(x.shape)
