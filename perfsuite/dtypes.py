"""The data types that cases name, their sizes and which peak each is held against."""

from __future__ import annotations

from dataclasses import dataclass

from perfsuite.errors import CaseError


@dataclass(frozen=True, kw_only=True)
class DType:
    """One data type of a case: ``itemsize`` in bytes, the torch attribute that stores it, its operations' unit."""

    name: str
    itemsize: int
    torch_name: str
    unit: str = "FLOP"


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType(name="fp64", itemsize=8, torch_name="float64"),
        DType(name="fp32", itemsize=4, torch_name="float32"),
        DType(name="tf32", itemsize=4, torch_name="float32"),
        DType(name="bf16", itemsize=2, torch_name="bfloat16"),
        DType(name="fp16", itemsize=2, torch_name="float16"),
        DType(name="fp8", itemsize=1, torch_name="float8_e4m3fn"),
        DType(name="int8", itemsize=1, torch_name="int8", unit="OP"),
    )
}


def dtype_of(name: str) -> DType:
    """The data type called ``name``; a CaseError that lists the known ones otherwise."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise CaseError(f"dtype={name!r} is not known; use one of {', '.join(DTYPES)}") from None
