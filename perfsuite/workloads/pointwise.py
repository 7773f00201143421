"""Normalisation, activation and other element-wise work on (rows, cols): bound by memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.dtypes import dtype_of
from perfsuite.errors import CaseError
from perfsuite.workloads.base import Step, Work, Workload, one_of, plain_float, positive_int, true_or_false
from perfsuite.workloads.tensors import poisoned, random_source, random_tensor, torch_dtype

if TYPE_CHECKING:
    import torch

EPS = 1e-5
ACCUMULATE_ITEMSIZE = 4
"""Formulas written out compute bf16 and fp16 in fp32, as models that spell them out do."""


@dataclass(frozen=True, kw_only=True)
class Pointwise(Workload):
    """Work on ``rows`` by ``cols`` elements; ``tensors`` of that size go in, one comes out."""

    metric = "mbu"
    tensors: ClassVar[int] = 1
    row_vectors: ClassVar[int] = 0
    """Inputs of ``cols`` elements, such as a weight."""
    temporaries: ClassVar[int] = 0
    """Intermediates of full size that are alive at the peak."""

    rows: int
    cols: int

    def cpu_control(self) -> str | None:
        """One core computes these more slowly than memory feeds it."""
        return "matmul"

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        plain_float(name, self.dtype)
        positive_int(name, "rows", self.rows)
        positive_int(name, "cols", self.cols)

    def work(self) -> Work:
        """Each input once and the output once, whether fused or not; element-wise work counts no FLOPs."""
        elements = (self.tensors + 1) * self.rows * self.cols + self.row_vectors * self.cols
        return Work(flops=0, nbytes=elements * dtype_of(self.dtype).itemsize)

    def memory_bytes(self) -> int | None:
        """Inputs, output and intermediates."""
        held = self.temporaries * self.rows * self.cols * dtype_of(self.dtype).itemsize
        return (self.work().nbytes or 0) + held

    def _inputs(self, device: str) -> list[torch.Tensor]:
        """The full-sized inputs, then the row vectors."""
        source = random_source(device)
        full = [random_tensor((self.rows, self.cols), self.dtype, source) for _ in range(self.tensors)]
        return full + [random_tensor((self.cols,), self.dtype, source) for _ in range(self.row_vectors)]


@dataclass(frozen=True, kw_only=True)
class Fusable(Pointwise):
    """Work that torch has one kernel for (``fused``), and that its formula spells out in several."""

    formula_tensors: ClassVar[int]
    """Tensors of full size that the formula holds at its peak beside the inputs, the output among them."""

    fused: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        true_or_false(type(self).__name__, "fused", self.fused)

    def memory_bytes(self) -> int | None:
        """Inputs, output, and the formula's intermediates where it is spelt out; narrow inputs are copied first."""
        if self.fused:
            return super().memory_bytes()
        itemsize = dtype_of(self.dtype).itemsize
        narrow = itemsize < ACCUMULATE_ITEMSIZE
        inputs = (self.tensors * self.rows + self.row_vectors) * self.cols * itemsize
        held = (self.formula_tensors + narrow) * self.rows * self.cols
        return inputs + held * max(itemsize, ACCUMULATE_ITEMSIZE)


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Fusable):
    """Layer normalisation over the columns, with weight and bias."""

    kind = "layer_norm"
    row_vectors = 2
    formula_tensors = 3

    def build(self, device: str) -> Step:
        """torch's kernel, or mean, variance and scaling one by one."""
        from torch.nn import functional

        x, weight, bias = self._inputs(device)
        if self.fused:
            return partial(functional.layer_norm, x, (self.cols,), weight, bias, EPS)
        return partial(_layer_norm, x, weight, bias)


@dataclass(frozen=True, kw_only=True)
class RMSNorm(Fusable):
    """Root-mean-square normalisation over the columns, with a weight."""

    kind = "rms_norm"
    row_vectors = 1
    formula_tensors = 2

    def build(self, device: str) -> Step:
        """torch's function, or its formula one operation at a time."""
        from torch.nn import functional

        x, weight = self._inputs(device)
        if self.fused:
            return partial(functional.rms_norm, x, (self.cols,), weight, EPS)
        return partial(_rms_norm, x, weight)


@dataclass(frozen=True, kw_only=True)
class Softmax(Fusable):
    """Softmax over the columns."""

    kind = "softmax"
    formula_tensors = 3

    def build(self, device: str) -> Step:
        """torch's kernel, or maximum, exponential, sum and division one by one."""
        import torch

        (x,) = self._inputs(device)
        if not self.fused:
            return partial(_softmax, x)
        return partial(torch.softmax, x, -1, out=poisoned(tuple(x.shape), x.dtype, device))


@dataclass(frozen=True, kw_only=True)
class Gelu(Fusable):
    """GELU; ``approximate`` is ``none`` (by the error function) or ``tanh``."""

    kind = "gelu"
    formula_tensors = 4

    approximate: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("Gelu", "approximate", self.approximate, ("none", "tanh"))

    def build(self, device: str) -> Step:
        """torch's kernel, or the formula one operation at a time."""
        from torch.nn import functional

        (x,) = self._inputs(device)
        if self.fused:
            return partial(functional.gelu, x, approximate=self.approximate)
        return partial(_gelu_tanh if self.approximate == "tanh" else _gelu, x)


@dataclass(frozen=True, kw_only=True)
class SiluMul(Pointwise):
    """The gate of a SwiGLU MLP, silu(gate) up: torch has no single kernel for it, so two run."""

    kind = "silu_mul"
    tensors = 2
    temporaries = 1

    def build(self, device: str) -> Step:
        """As models write it."""
        return partial(_silu_mul, *self._inputs(device))


@dataclass(frozen=True, kw_only=True)
class Dropout(Pointwise):
    """Dropout in training: each element is zeroed with probability ``p``, the others grow by 1/(1-p)."""

    kind = "dropout"
    temporaries = 1

    p: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_probability(self.p):
            raise CaseError(f"Dropout: p={self.p!r} must be a number between 0 and 1")

    def build(self, device: str) -> Step:
        """New random numbers in every step."""
        from torch.nn import functional

        (x,) = self._inputs(device)
        return partial(functional.dropout, x, self.p, training=True)


@dataclass(frozen=True, kw_only=True)
class ResidualAdd(Pointwise):
    """The sum of a layer's output and its input."""

    kind = "residual_add"
    tensors = 2

    def cpu_control(self) -> str | None:
        """A stream, for which memory is the bound on a CPU too."""
        return "memmove"

    def build(self, device: str) -> Step:
        """One addition."""
        import torch

        x, residual = self._inputs(device)
        out = poisoned((self.rows, self.cols), torch_dtype(self.dtype), device)
        return partial(torch.add, x, residual, out=out)


def _is_probability(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < 1


def _accumulated(x: torch.Tensor) -> torch.Tensor:
    """``x`` in fp32 where it is narrower."""
    return x.float() if x.itemsize < ACCUMULATE_ITEMSIZE else x


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    import torch

    wide = _accumulated(x)
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return (centred * scale * weight + bias).to(x.dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> Any:
    import torch

    wide = _accumulated(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (wide * scale * weight).to(x.dtype)


def _softmax(x: torch.Tensor) -> Any:
    wide = _accumulated(x)
    grown = (wide - wide.amax(-1, keepdim=True)).exp()
    return (grown / grown.sum(-1, keepdim=True)).to(x.dtype)


def _gelu(x: torch.Tensor) -> Any:
    wide = _accumulated(x)
    return (0.5 * wide * (1 + (wide * math.sqrt(0.5)).erf())).to(x.dtype)


def _gelu_tanh(x: torch.Tensor) -> Any:
    wide = _accumulated(x)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide.pow(3))
    return (0.5 * wide * (1 + inner.tanh())).to(x.dtype)


def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> Any:
    from torch.nn import functional

    return functional.silu(gate) * up
