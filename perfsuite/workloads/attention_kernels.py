"""torch's kernels for attention: what each of them takes, and how it is called."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from perfsuite.workloads.base import Target, lacks_dtype
from perfsuite.workloads.execution import compiled, why_not

if TYPE_CHECKING:
    import torch
    from torch.nn.attention import SDPBackend

BACKENDS = ("auto", "flash", "efficient", "math", "cudnn", "flex")
NARROW = ("bf16", "fp16")

_SDPA_NAMES = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
    "cudnn": "CUDNN_ATTENTION",
}

Attend = Callable[..., Any]
"""Takes q, k and v."""


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """One of BACKENDS for one shape; with ``masked`` the last query sees every key, those before it one less each."""

    backend: str
    dtype: str
    head_dim: int
    q_len: int
    kv_len: int
    grouped: bool
    masked: bool
    backward: bool

    def refuses(self, target: Target) -> str | None:
        """Why torch cannot run it on ``target``, in a few words; None where it can.

        Grouped heads go with ``auto``, ``flash``, ``math``, ``cudnn`` and ``flex``.
        """
        reason = lacks_dtype(self.dtype, target)
        if reason is None and self.backend in _REFUSALS:
            reason = _REFUSALS[self.backend](self, target)
        return reason

    def function(self, device: str) -> Attend:
        """torch's function for tensors on ``device``, mask and backend settled."""
        # On meta nothing can be compiled, and torch's own function counts the same matmuls.
        return self._flex(device) if self.backend == "flex" and device != "meta" else self._sdpa()

    def _sdpa(self) -> Attend:
        """``scaled_dot_product_attention``, held to the backend where one is named."""
        from torch.nn import functional
        from torch.nn.attention import SDPBackend

        attend: Attend = partial(functional.scaled_dot_product_attention, enable_gqa=self.grouped)
        if self.masked and self.q_len == self.kv_len:
            attend = partial(attend, is_causal=True)
        elif self.masked:
            # torch's own flag aligns to the upper left; this import takes seconds, and brings in the compiler.
            from torch.nn.attention.bias import causal_lower_right

            attend = partial(attend, attn_mask=causal_lower_right(self.q_len, self.kv_len))
        name = _SDPA_NAMES.get(self.backend)
        return attend if name is None else partial(_forced, getattr(SDPBackend, name), attend)

    def _flex(self, device: str) -> Attend:
        """FlexAttention, which skips the blocks that the mask hides."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = None
        if self.masked:
            sees = _lower_right(self.kv_len - self.q_len)
            mask = create_block_mask(sees, None, None, self.q_len, self.kv_len, device=device)
        return partial(compiled(flex_attention, device=device), block_mask=mask, enable_gqa=self.grouped)


def _forced(backend: SDPBackend, attend: Attend, *operands: torch.Tensor) -> Any:
    """``attend`` with one backend allowed; an error of torch's where that one cannot."""
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel(backend):
        return attend(*operands)


def _lower_right(ahead: int) -> Callable[..., Any]:
    """Which keys a query sees, where the first query sees ``ahead`` keys before its own."""

    def sees(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query + ahead >= key

    return sees


def _flash_refuses(kernel: AttentionKernel, target: Target) -> str | None:
    """torch's kernel for CPUs takes everything, the one for GPUs does not (its sdp_utils.cpp, as for the next two)."""
    if target.backend == "cpu":
        return None
    if kernel.head_dim > 256:
        return f"torch's flash kernel takes heads of at most 256 on a GPU, not {kernel.head_dim}"
    return _needs_half(kernel, target)


def _efficient_refuses(kernel: AttentionKernel, target: Target) -> str | None:
    """Memory-efficient attention, by CUTLASS on CUDA and AOTriton on ROCm."""
    if target.backend not in ("cuda", "rocm"):
        return f"torch has no memory-efficient attention for {_named(target)}"
    if kernel.grouped:
        return "torch's efficient kernel takes no grouped heads"
    if kernel.dtype == "fp64":
        return "torch's efficient kernel takes no fp64"
    return _needs_multiple(kernel, 8 if kernel.dtype in NARROW else 4)


def _cudnn_refuses(kernel: AttentionKernel, target: Target) -> str | None:
    """cuDNN's fused attention; heads of 256, which it has for some shapes on Hopper and Blackwell, are left out."""
    if target.backend != "cuda":
        return f"no cuDNN on {_named(target)}"
    if kernel.head_dim > 128:
        return f"torch's cudnn kernel takes heads of at most 128, not {kernel.head_dim}"
    if kernel.kv_len == 1:
        return "torch's cudnn kernel takes no single key"
    return _needs_multiple(kernel, 8) or _needs_half(kernel, target)


def _flex_refuses(kernel: AttentionKernel, target: Target) -> str | None:
    """torch writes it in C++ for x86 CPUs, forward alone, and in Triton for GPUs."""
    if target.backend == "cpu":
        if kernel.backward:
            return "FlexAttention has no backward pass on a CPU"
        if platform.machine().lower() not in ("x86_64", "amd64") or sys.platform == "darwin":
            return "FlexAttention on a CPU needs an x86 with AVX2, and not macOS"
    elif kernel.head_dim < 16:
        return f"FlexAttention takes heads of at least 16 on a GPU, not {kernel.head_dim}"
    return why_not("compile", target)


def _needs_half(kernel: AttentionKernel, target: Target) -> str | None:
    """The fused kernels for GPUs compute in bf16 and fp16, on matrix units that came with Ampere."""
    if kernel.dtype not in NARROW:
        return f"torch's {kernel.backend} kernel takes bf16 and fp16 on a GPU, not {kernel.dtype}"
    if target.backend == "cuda" and not target.at_least(8):
        has = target.compute_capability or "unknown"
        return f"torch's {kernel.backend} kernel needs compute capability 8.0, this device's is {has}"
    return None


def _needs_multiple(kernel: AttentionKernel, unit: int) -> str | None:
    """Kernels load whole vectors of a head."""
    if kernel.head_dim % unit:
        return f"torch's {kernel.backend} kernel takes heads of a multiple of {unit}, not {kernel.head_dim}"
    return None


def _named(target: Target) -> str:
    return "a CPU" if target.backend == "cpu" else target.backend


_REFUSALS: dict[str, Callable[[AttentionKernel, Target], str | None]] = {
    "flash": _flash_refuses,
    "efficient": _efficient_refuses,
    "cudnn": _cudnn_refuses,
    "flex": _flex_refuses,
}
