"""Matrix multiplication, dense and batched, in every data type that torch multiplies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from perfsuite.dtypes import dtype_of
from perfsuite.errors import CaseError
from perfsuite.flops import matmul_flops
from perfsuite.workloads.base import Step, Target, Work, Workload, lacks_dtype, positive_int, true_or_false
from perfsuite.workloads.tensors import RandomSource, poisoned, random_source, random_tensor, torch_dtype

if TYPE_CHECKING:
    import torch

SCALE_BYTES = 4
"""One fp32 scale for each fp8 input."""

# What is stored, where it is not the inputs' own data type: fp8 products as bf16, int8 products as int32.
OUTPUT_ITEMSIZE = {"fp8": 2, "int8": 4}


@dataclass(frozen=True, kw_only=True)
class Gemm(Workload):
    """``batch`` products of an (m, k) and a (k, n) matrix: 2 batch m n k FLOPs.

    ``transpose_a`` stores the left matrices as (k, m), ``transpose_b`` the right ones as (n, k), the layout of a
    linear layer's weight. The 8-bit types have this layout alone: int8 yields int32, fp8 bf16 with a scale per input.
    """

    kind = "gemm"

    m: int
    n: int
    k: int
    batch: int = 1
    transpose_a: bool = False
    transpose_b: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("m", "n", "k", "batch"):
            positive_int("Gemm", name, getattr(self, name))
        for name in ("transpose_a", "transpose_b"):
            true_or_false("Gemm", name, getattr(self, name))
        if self.dtype in OUTPUT_ITEMSIZE:
            _check_eight_bit(self)

    def work(self) -> Work:
        """Both inputs read once, the output written once; with fp8 the two scales as well."""
        itemsize = dtype_of(self.dtype).itemsize
        scales = 2 * SCALE_BYTES if self.dtype == "fp8" else 0
        inputs = (self.m * self.k + self.k * self.n) * itemsize
        output = self.m * self.n * OUTPUT_ITEMSIZE.get(self.dtype, itemsize)
        return Work(
            flops=matmul_flops(m=self.m, n=self.n, k=self.k, batch=self.batch),
            nbytes=self.batch * (inputs + output) + scales,
        )

    def memory_bytes(self) -> int | None:
        """Inputs and outputs; a library's workspace (tens of MiB) is not known before it is asked for."""
        return self.work().nbytes

    def unsupported(self, target: Target) -> str | None:
        """Where the data type has no matrix units, or torch only a reference loop for it."""
        if self.dtype == "fp8":
            if target.backend == "cpu":
                return "torch has only a slow reference loop for fp8 on a CPU"
            if target.backend != "cuda":
                return "fp8 GEMMs are declared for CUDA devices only"
        return lacks_dtype(self.dtype, target)

    def build(self, device: str) -> Step:
        """Random inputs, a poisoned output, and the library's own routine on them."""
        import torch

        source = random_source(device)
        a = self._stored(self.m, self.k, transposed=self.transpose_a, source=source)
        eight_bit = self.dtype in OUTPUT_ITEMSIZE
        b = self._stored(self.k, self.n, transposed=self.transpose_b or eight_bit, source=source)
        if self.dtype == "fp8":
            return _scaled_step(a, b)
        product = torch.int32 if self.dtype == "int8" else torch_dtype(self.dtype)
        shape = (self.m, self.n) if self.batch == 1 else (self.batch, self.m, self.n)
        out = poisoned(shape, product, device)
        if self.dtype == "int8":
            return partial(torch._int_mm, a, b, out=out)  # noqa: SLF001 - torch has no public int8 matmul
        return partial(torch.mm if self.batch == 1 else torch.bmm, a, b, out=out)

    def _stored(self, rows: int, columns: int, *, transposed: bool, source: RandomSource) -> torch.Tensor:
        """One operand as (rows, columns), whichever way round its memory lies."""
        shape = (columns, rows) if transposed else (rows, columns)
        whole = shape if self.batch == 1 else (self.batch, *shape)
        stored = random_tensor(whole, self.dtype, source)
        return stored.mT if transposed else stored


def _check_eight_bit(gemm: Gemm) -> None:
    """The shapes that torch's 8-bit products take, on every device alike."""
    unit = 16 if gemm.dtype == "fp8" else 8
    for name in ("n", "k"):
        value = getattr(gemm, name)
        if value % unit:
            raise CaseError(f"Gemm: {name}={value} must be a multiple of {unit} with dtype={gemm.dtype!r}")
    if gemm.dtype == "int8" and gemm.m <= 16:
        raise CaseError(f"Gemm: m={gemm.m} must be more than 16 with dtype='int8'")
    if gemm.batch != 1:
        raise CaseError(f"Gemm: batch={gemm.batch} must be 1 with dtype={gemm.dtype!r}: torch has no batched form")
    for name in ("transpose_a", "transpose_b"):
        if getattr(gemm, name):
            # Of the four, cuBLAS takes this one on every generation: fp8 before Blackwell, int8 under CUDA 13.
            raise CaseError(
                f"Gemm: {name}=True does not go with dtype={gemm.dtype!r}: b is stored as (n, k) anyway; leave it out"
            )


def _scaled_step(a: torch.Tensor, b: torch.Tensor) -> Step:
    """An fp8 product with one scale per input; torch allocates the bf16 output, its public form takes none."""
    import torch
    from torch.nn import functional

    scale_a, scale_b = (torch.ones(1, device=a.device) for _ in range(2))
    if not hasattr(functional, "scaled_mm"):
        # torch before 2.10 has this form alone.
        return partial(torch._scaled_mm, a, b, scale_a, scale_b, out_dtype=torch.bfloat16)  # noqa: SLF001 - see above
    whole = functional.ScalingType.TensorWise
    return partial(functional.scaled_mm, a, b, scale_a, whole, scale_b, whole, output_dtype=torch.bfloat16)
