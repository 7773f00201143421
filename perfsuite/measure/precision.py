"""Matmul precision of a case: IEEE for fp32, TF32 for tf32; set before the build and put back after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class PrecisionChangedError(Exception):
    """A case changed the flags while it was measured, so that no value of them says what was measured."""


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Hold the flags that ``dtype`` needs, as long as the case does not set others itself."""
    import torch

    cudnn = torch.backends.cudnn
    before = matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    cudnn.allow_tf32 = dtype == "tf32"  # for convolutions torch's own default is TF32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]


def precision_flags(backend: str) -> dict[str, str | bool]:
    """The flags in force that change results or speed, for the record and the baseline's fingerprint."""
    import torch

    flags: dict[str, str | bool] = {"float32_matmul": matmul_precision()}
    if backend in ("cuda", "rocm"):
        matmul = torch.backends.cuda.matmul
        flags["reduced_precision_fp16"] = bool(matmul.allow_fp16_reduced_precision_reduction)
        flags["reduced_precision_bf16"] = bool(matmul.allow_bf16_reduced_precision_reduction)
        flags["accumulation_fp16"] = bool(getattr(matmul, "allow_fp16_accumulation", False))
    return flags


def refuse_change(before: dict[str, str | bool], after: dict[str, str | bool]) -> None:
    """A PrecisionChangedError with the flag and both its values, where any changed."""
    for name, value in before.items():
        if after[name] != value:
            raise PrecisionChangedError(
                f"the precision changed while the case was measured: {name} was {value}, then {after[name]}; "
                "set it in build"
            )


def matmul_precision() -> str:
    """torch's own word for fp32; ``mixed`` where its old and its new interface were used, of which torch tells none."""
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"
