"""Reductions of a (rows, cols) matrix along one dimension, or to a single number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from perfsuite.dtypes import dtype_of
from perfsuite.errors import CaseError
from perfsuite.workloads.base import Step, Work, Workload, plain_float, positive_int
from perfsuite.workloads.tensors import poisoned, random_source, random_tensor, torch_dtype

OPS = ("sum", "mean", "max", "argmax", "norm")
INDEX_ITEMSIZE = 8


@dataclass(frozen=True, kw_only=True)
class Reduction(Workload):
    """``op`` over dimension ``dim`` of (rows, cols): 0 leaves cols numbers, 1 leaves rows, None a single one.

    ``norm`` is the Euclidean norm, as in gradient clipping; ``argmax`` yields int64.
    """

    kind = "reduction"
    metric = "mbu"

    op: str
    rows: int
    cols: int
    dim: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        plain_float("Reduction", self.dtype)
        positive_int("Reduction", "rows", self.rows)
        positive_int("Reduction", "cols", self.cols)
        if self.op not in OPS:
            raise CaseError(f"Reduction: op={self.op!r} must be one of {', '.join(OPS)}")
        if isinstance(self.dim, bool) or self.dim not in (0, 1, None):
            raise CaseError(f"Reduction: dim={self.dim!r} must be 0, 1 or None")

    @property
    def _kept(self) -> tuple[int, ...]:
        """The result's shape."""
        return {0: (self.cols,), 1: (self.rows,), None: ()}[self.dim]

    def work(self) -> Work:
        """The matrix once and the result once; additions and comparisons count no FLOPs."""
        itemsize = dtype_of(self.dtype).itemsize
        results = self._kept[0] if self._kept else 1
        result_bytes = results * (INDEX_ITEMSIZE if self.op == "argmax" else itemsize)
        return Work(flops=0, nbytes=self.rows * self.cols * itemsize + result_bytes)

    def cpu_control(self) -> str | None:
        """Rows are read as fast as memory gives them; an index, or sums down the columns, cost more than that."""
        return "matmul" if self.op == "argmax" or self.dim == 0 else "memmove"

    def memory_bytes(self) -> int | None:
        """The matrix and the result."""
        return self.work().nbytes

    def build(self, device: str) -> Step:
        """torch's reduction into a poisoned result."""
        import torch

        x = random_tensor((self.rows, self.cols), self.dtype, random_source(device))
        yields = torch.int64 if self.op == "argmax" else torch_dtype(self.dtype)
        out = poisoned(self._kept, yields, device)
        if self.op == "argmax":
            return partial(torch.argmax, x, dim=self.dim, out=out)
        over = (0, 1) if self.dim is None else (self.dim,)
        return partial(_torch_function(self.op), x, dim=over, out=out)


def _torch_function(op: str) -> Callable[..., Any]:
    """torch's public function for ``op``."""
    import torch

    functions: dict[str, Callable[..., Any]] = {
        "sum": torch.sum,
        "mean": torch.mean,
        "max": torch.amax,
        "norm": torch.linalg.vector_norm,
    }
    return functions[op]
