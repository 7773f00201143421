"""Matmul precision of a case: IEEE for fp32, TF32 for tf32; set before the build and put back after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def precision(dtype: str, backend: str) -> Iterator[dict[str, str | bool]]:
    """Hold the flags that ``dtype`` needs and give what is in force, for the record and the baseline's fingerprint."""
    import torch

    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    cudnn.allow_tf32 = dtype == "tf32"  # for convolutions torch's own default is TF32
    try:
        yield _flags(backend)
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]


def _flags(backend: str) -> dict[str, str | bool]:
    """The flags that change results or speed."""
    import torch

    flags: dict[str, str | bool] = {"float32_matmul": torch.get_float32_matmul_precision()}
    if backend in ("cuda", "rocm"):
        matmul = torch.backends.cuda.matmul
        flags["reduced_precision_fp16"] = bool(matmul.allow_fp16_reduced_precision_reduction)
        flags["reduced_precision_bf16"] = bool(matmul.allow_bf16_reduced_precision_reduction)
        flags["accumulation_fp16"] = bool(getattr(matmul, "allow_fp16_accumulation", False))
    return flags
