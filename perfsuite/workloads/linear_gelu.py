"""A linear layer and its GELU: one kernel, or two with the intermediate written and read again between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from perfsuite.dtypes import dtype_of
from perfsuite.errors import CaseError
from perfsuite.flops import Parts, linear_part, trained
from perfsuite.workloads.base import (
    Prepared,
    Target,
    Work,
    Workload,
    lacks_dtype,
    one_of,
    positive_int,
    true_or_false,
    work_of_parts,
)
from perfsuite.workloads.execution import EXECUTIONS, compiled, launch_of, why_not
from perfsuite.workloads.tensors import random_source, random_tensor
from perfsuite.workloads.transformer import DTYPES, TOLERANCES

if TYPE_CHECKING:
    from torch import Tensor

FUSED_BACKENDS = ("cpu", "cuda", "rocm")


@dataclass(frozen=True, kw_only=True)
class LinearGelu(Workload):
    """gelu(x w' + b) on ``tokens`` rows: x is (tokens, d_in), w (d_out, d_in).

    ``fused`` is torch's ``_addmm_activation``: GELU in the epilogue of the matmul on a GPU, in place after it on a CPU.
    Without it F.linear and F.gelu run one after the other, by torch.compile where ``execution`` says so. GELU's form is
    what the fused kernel has: tanh on a GPU, the error function on a CPU. ``backward`` adds the gradients of x, w and
    b, for which the fused kernel has none.
    """

    kind = "linear_gelu"

    tokens: int
    d_in: int
    d_out: int
    fused: bool = False
    backward: bool = False
    execution: str = "eager"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokens", "d_in", "d_out"):
            positive_int("LinearGelu", name, getattr(self, name))
        for name in ("fused", "backward"):
            true_or_false("LinearGelu", name, getattr(self, name))
        one_of("LinearGelu", "execution", self.execution, EXECUTIONS)
        one_of("LinearGelu", "dtype", self.dtype, DTYPES)
        if self.fused and self.backward:
            raise CaseError("LinearGelu: backward=True needs fused=False: torch's fused kernel has no backward pass")
        if self.fused and self.execution == "compile":
            raise CaseError("LinearGelu: execution='compile' needs fused=False: the fused kernel is compiled already")

    @property
    def rtol(self) -> float:
        """Relative tolerance: the fused kernel does not round what it hands on to GELU."""
        return TOLERANCES[self.dtype]

    atol = rtol

    def parts(self) -> Parts:
        """The matmul; GELU counts nothing."""
        part = linear_part("linear", tokens=self.tokens, weights=self.d_in * self.d_out)
        return trained((part,)) if self.backward else (part,)

    def work(self) -> Work:
        """x, w and b read once, the output written once, whether fused or not; backward their gradients as well."""
        nbytes = (2 if self.backward else 1) * (self._inputs() + self._output())
        return work_of_parts(self.parts(), dtype=self.dtype, nbytes=nbytes, tokens=self.tokens)

    def _inputs(self) -> int:
        """Bytes of x, w and b, or of their gradients."""
        return (self.tokens * self.d_in + (self.d_in + 1) * self.d_out) * dtype_of(self.dtype).itemsize

    def _output(self) -> int:
        """Bytes of the output, of GELU's input, or of a gradient of either."""
        return self.tokens * self.d_out * dtype_of(self.dtype).itemsize

    def memory_bytes(self) -> int | None:
        """Inputs and outputs, and GELU's input where it has memory of its own; backward the gradients that come."""
        if not self.backward:
            in_place = self.fused or self.execution == "compile"
            return self._inputs() + (1 if in_place else 2) * self._output()
        return self._inputs() + 2 * self._output() + max(2 * self._output(), self._output() + self._inputs())

    def unsupported(self, target: Target) -> str | None:
        """Where the data type, the fused kernel or the way to run it is missing."""
        if self.fused and target.backend not in FUSED_BACKENDS:
            return f"which GELU torch fuses on {target.backend} is not known"
        return lacks_dtype(self.dtype, target) or why_not(self.execution, target)

    def cpu_control(self) -> str | None:
        """The matmul is most of its time."""
        return "matmul"

    def launch(self) -> str | None:
        """As ``execution`` says."""
        return launch_of(self.execution)

    def build(self, device: str) -> Prepared:
        """Random numbers that keep their size; the reference is the plain form."""
        import torch

        source = random_source(device)
        sizes = ((self.tokens, self.d_in), (self.d_out, self.d_in), (self.d_out,))
        x, weight, bias = (random_tensor(size, self.dtype, source) for size in sizes)
        operands = tuple(each.requires_grad_(self.backward) for each in (x, weight.mul_(self.d_in**-0.5), bias))
        gradient = random_tensor((self.tokens, self.d_out), self.dtype, source) if self.backward else None
        approximate = "none" if device == "cpu" else "tanh"
        plain = partial(_plain, approximate)
        run = compiled(plain, device=device) if self.execution == "compile" else plain
        if self.fused:
            step: Any = partial(torch.ops.aten._addmm_activation, bias, x, weight.T, use_gelu=True)  # noqa: SLF001 - torch has no public one
        else:
            step = partial(_forward_backward, run, operands, gradient)
        reference = partial(_forward_backward, plain, operands, gradient)
        same = run is plain and not self.fused
        return Prepared(step=step, reference=None if same else reference, resident_bytes=self._resident_bytes)

    def _resident_bytes(self) -> int:
        return self._inputs() + (self._output() if self.backward else 0)


def _plain(approximate: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.gelu(functional.linear(x, weight, bias), approximate=approximate)


def _forward_backward(run: Any, operands: tuple[Tensor, ...], gradient: Tensor | None) -> Any:
    """The output, and the gradients of the operands where one of the output is given."""
    import torch

    out = run(*operands)
    if gradient is None:
        return out
    return (out.detach(), *torch.autograd.grad(out, operands, gradient))
