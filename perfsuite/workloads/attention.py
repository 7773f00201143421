"""Scaled dot-product attention by each of torch's backends, forward and backward, checked against its formula."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from perfsuite.dtypes import dtype_of
from perfsuite.errors import CaseError
from perfsuite.flops import Parts, attention_part, trained
from perfsuite.footprint import FP32_BYTES, MathAttention
from perfsuite.workloads.attention_formula import AttentionTensors, Formula
from perfsuite.workloads.attention_kernels import BACKENDS, NARROW, Attend, AttentionKernel
from perfsuite.workloads.base import (
    Prepared,
    Target,
    Work,
    Workload,
    one_of,
    positive_int,
    true_or_false,
    work_of_parts,
)
from perfsuite.workloads.tensors import random_source, random_tensor

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16")
TF32_BACKENDS = ("math", "flex")
"""torch's fused kernels do not look at the flag that asks for TF32."""


@dataclass(frozen=True, kw_only=True)
class Attention(Workload):
    """softmax(q k' / sqrt(head_dim)) v for ``batch`` sequences of ``heads`` heads with ``q_len`` queries each.

    ``kv_len`` is ``q_len`` and ``kv_heads`` is ``heads`` where left out; fewer ``kv_heads`` are shared by groups of
    query heads. A causal mask is aligned to the lower right: the last query sees every key. ``backend`` names torch's
    kernel (``auto`` leaves the choice to torch; ``flex`` is FlexAttention, compiled). ``backward`` adds the gradients
    of q, k and v to the step. What a fused kernel computes again in its backward pass is not counted.
    """

    kind = "attention"

    heads: int
    q_len: int
    head_dim: int
    batch: int = 1
    kv_len: int | None = None
    kv_heads: int | None = None
    causal: bool = True
    backend: str = "auto"
    backward: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        given = (name for name in ("kv_len", "kv_heads") if getattr(self, name) is not None)
        for name in ("batch", "heads", "q_len", "head_dim", *given):
            positive_int("Attention", name, getattr(self, name))
        for name in ("causal", "backward"):
            true_or_false("Attention", name, getattr(self, name))
        one_of("Attention", "backend", self.backend, BACKENDS)
        one_of("Attention", "dtype", self.dtype, DTYPES)
        self._check_combination()

    def _check_combination(self) -> None:
        if self.heads % self.key_heads:
            raise CaseError(f"Attention: heads={self.heads} must be a multiple of kv_heads={self.key_heads}")
        if self.causal and self.q_len > self.keys:
            raise CaseError(f"Attention: q_len={self.q_len} must not exceed kv_len={self.keys} with causal=True")
        if self.dtype == "tf32" and self.backend not in TF32_BACKENDS:
            allowed = " or ".join(map(repr, TF32_BACKENDS))
            raise CaseError(f"Attention: backend={self.backend!r} does not compute in tf32; use {allowed}, or fp32")
        if self.dtype == "fp64" and self.backend == "flex":
            raise CaseError("Attention: backend='flex' does not compute in fp64; use 'math', or fp32")

    @property
    def keys(self) -> int:
        """How many keys each sequence has."""
        return self.q_len if self.kv_len is None else self.kv_len

    @property
    def key_heads(self) -> int:
        """How many heads the keys have, and the values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def kernel(self) -> AttentionKernel:
        """torch's kernel for these shapes."""
        return AttentionKernel(
            backend=self.backend,
            dtype=self.dtype,
            head_dim=self.head_dim,
            q_len=self.q_len,
            kv_len=self.keys,
            grouped=self.key_heads != self.heads,
            masked=self.causal and self.q_len > 1,  # a single query is the last one, and sees every key
            backward=self.backward,
        )

    def parts(self) -> Parts:
        """Both matmuls; the math backend's are fp32 for bf16 and fp16, which torch widens first."""
        part = attention_part(
            batch=self.batch,
            heads=self.heads,
            q_len=self.q_len,
            kv_len=self.keys,
            head_dim=self.head_dim,
            causal=self.causal,
        )
        widened = self.backend == "math" and self.dtype in NARROW
        part = replace(part, dtype="fp32" if widened else None)
        return trained((part,)) if self.backward else (part,)

    def work(self) -> Work:
        """Each input once (q, k, v, the output's gradient) and each output once (the output, gradients of q, k, v).

        What a backward pass reads a second time is no more counted than the scores are. Tokens are queries.
        """
        nbytes = self._input_bytes() + self._output_bytes()
        return work_of_parts(self.parts(), dtype=self.dtype, nbytes=nbytes, tokens=self.batch * self.q_len)

    def memory_bytes(self) -> int | None:
        """Inputs, outputs and intermediates; the buffers of one tile for each thread are not known."""
        return sum(self.memory_parts().values())

    def memory_parts(self) -> dict[str, int]:
        """Bytes of inputs and outputs, and of what is alive between them at the peak."""
        between = self._formula_bytes() if self.backend == "math" else self._fused_bytes()
        return {"inputs": self._input_bytes(), "outputs": self._output_bytes(), "intermediates": between}

    def _query_bytes(self) -> int:
        """q, the output, or the gradient of either."""
        return self.batch * self.heads * self.q_len * self.head_dim * dtype_of(self.dtype).itemsize

    def _key_bytes(self, heads: int) -> int:
        """k, v, or the gradient of either, were there so many heads."""
        return self.batch * heads * self.keys * self.head_dim * dtype_of(self.dtype).itemsize

    def _input_bytes(self) -> int:
        return (2 if self.backward else 1) * self._query_bytes() + 2 * self._key_bytes(self.key_heads)

    def _output_bytes(self) -> int:
        return self._input_bytes() if self.backward else self._query_bytes()

    def _fused_bytes(self) -> int:
        """A number for each row; backward another, q's gradient summed up in fp32, and k's and v's by query head."""
        rows = self.batch * self.heads * self.q_len
        if not self.backward:
            return rows * FP32_BYTES
        by_head = 2 * self._key_bytes(self.heads) if self.kernel.grouped else 0
        return rows * (2 + self.head_dim) * FP32_BYTES + by_head

    def _formula_bytes(self) -> int:
        """Scores and what is computed on the way to and from them."""
        unfused = MathAttention(
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.key_heads,
            q_len=self.q_len,
            kv_len=self.keys,
            head_dim=self.head_dim,
            itemsize=dtype_of(self.dtype).itemsize,
            masked=self.kernel.masked,
        )
        return unfused.backward_peak() if self.backward else unfused.forward_peak()

    def unsupported(self, target: Target) -> str | None:
        """Where torch has no such kernel, or it does not take these shapes or this data type."""
        return self.kernel.refuses(target)

    def cpu_control(self) -> str | None:
        """One core computes attention more slowly than memory feeds it, for single queries too."""
        return "matmul"

    def launch(self) -> str | None:
        """FlexAttention is a kernel only once it is compiled."""
        return "compile" if self.backend == "flex" else None

    def build(self, device: str) -> Prepared:
        """Random q, k, v (and gradient of the output), and torch's function on them."""
        source = random_source(device)
        queries = (self.batch, self.heads, self.q_len, self.head_dim)
        keys = (self.batch, self.key_heads, self.keys, self.head_dim)
        query, key, value = (
            random_tensor(shape, self.dtype, source).requires_grad_(self.backward) for shape in (queries, keys, keys)
        )
        tensors = AttentionTensors(
            query=query,
            key=key,
            value=value,
            gradient=random_tensor(queries, self.dtype, source) if self.backward else None,
        )
        step = partial(_run, self.kernel.function(device), tensors)
        formula = Formula(
            tensors=tensors, dtype=self.dtype, ahead=self.keys - self.q_len if self.kernel.masked else None
        )
        return Prepared(step=step, check=lambda: formula.fault(step()), resident_bytes=self._input_bytes)


def _run(attend: Attend, tensors: AttentionTensors) -> Any:
    """The output; where a gradient of it is given, also those of q, k and v, which are new tensors each time."""
    import torch

    operands = (tensors.query, tensors.key, tensors.value)
    out = attend(*operands)
    if tensors.gradient is None:
        return out
    return (out, *torch.autograd.grad(out, operands, tensors.gradient))
