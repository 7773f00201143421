"""A linear layer whose weight alone is quantized: decoding a token reads half or a quarter of bf16's bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from perfsuite.dtypes import dtype_of
from perfsuite.errors import CaseError
from perfsuite.flops import matmul_flops
from perfsuite.workloads.base import Prepared, Step, Target, Work, Workload, lacks_dtype, one_of, positive_int
from perfsuite.workloads.tensors import RandomSource, random_integers, random_source, random_tensor, torch_dtype

if TYPE_CHECKING:
    import torch

BITS = (4, 8)
GROUPS = (32, 64, 128, 256)
DTYPES = ("fp32", "bf16", "fp16")
UNIT = 16
"""torch's kernels load whole vectors and tiles; on a CPU the int8 one reads past the end of other sizes and crashes."""
ZERO_POINT = 8
"""The int4 value from 0 to 15 that stands for the group's own offset."""
ROUNDINGS = 4
"""How many times the epsilon of its data type, and the usual error of its sums, a result may be off."""

# Spread of the whole numbers: uniform over 256 values, and over 16.
SPREAD = {8: 256 / math.sqrt(12), 4: 16 / math.sqrt(12)}


@dataclass(frozen=True, kw_only=True)
class QuantizedGemv(Workload):
    """y = x w' for ``batch`` tokens: x is (batch, k) and y (batch, n) in ``dtype``, w is (n, k) in ``bits`` bits.

    8 bits have one scale for each of the n outputs (torch's ``_weight_int8pack_mm``); 4 bits have a scale and an
    offset for each ``group`` of inputs (``_weight_int4pack_mm``). On CUDA torch's int8 kernel reads its weight with a
    thread for each output and computes in fp32: slow, and measured as it is.
    """

    kind = "quantized_gemv"
    metric = "mbu"

    n: int
    k: int
    batch: int = 1
    bits: int = 8
    group: int | None = None
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n", "k", "batch"):
            positive_int("QuantizedGemv", name, getattr(self, name))
        one_of("QuantizedGemv", "dtype", self.dtype, DTYPES)
        for name in ("n", "k"):
            if getattr(self, name) % UNIT:
                raise CaseError(f"QuantizedGemv: {name}={getattr(self, name)} must be a multiple of {UNIT}")
        self._check_group()

    def _check_group(self) -> None:
        # By their types too: 4.0 is in BITS, and True would be a 1.
        if type(self.bits) is not int or self.bits not in BITS:
            raise CaseError(f"QuantizedGemv: bits={self.bits!r} must be 4 or 8")
        if self.bits == 8 and self.group is not None:
            raise CaseError(f"QuantizedGemv: group={self.group!r} goes with bits=4; int8 has one scale for each output")
        if self.bits == 4 and (type(self.group) is not int or self.group not in GROUPS):
            allowed = ", ".join(map(str, GROUPS))
            raise CaseError(f"QuantizedGemv: group={self.group!r} must be one of {allowed} with bits=4")
        if self.group is not None and self.k % self.group:
            raise CaseError(f"QuantizedGemv: k={self.k} must be a multiple of group={self.group}")

    @property
    def tolerance(self) -> float:
        """What a result of size 1 may be off: roundings to its data type, and a long sum's usual error."""
        import torch

        stored, summed = torch.finfo(torch_dtype(self.dtype)).eps, torch.finfo(torch.float32).eps
        return ROUNDINGS * (stored + summed * math.sqrt(self.k))

    rtol = tolerance
    atol = tolerance

    def work(self) -> Work:
        """The packed weight, its scales and offsets and x read once, y written once."""
        itemsize = dtype_of(self.dtype).itemsize
        scales = self.n if self.group is None else 2 * self.n * (self.k // self.group)
        weight = self.n * self.k * self.bits // 8
        return Work(
            flops=matmul_flops(m=self.batch, n=self.n, k=self.k),
            nbytes=weight + (scales + self.batch * (self.k + self.n)) * itemsize,
            tokens=self.batch,
        )

    def memory_bytes(self) -> int | None:
        """What is read and written; packing and checking hold the weight as int32 or fp32 for a moment before."""
        return self.work().nbytes

    def unsupported(self, target: Target) -> str | None:
        """Where torch has no such kernel, or it does not take these activations."""
        if target.backend not in ("cpu", "cuda"):
            return "weight-only quantized kernels are declared for CPUs and CUDA devices only"
        if target.backend == "cuda" and self.bits == 4:
            if self.dtype != "bf16":
                return f"torch's int4 kernel takes bf16 activations on CUDA, not {self.dtype}"
            if not target.at_least(8):
                has = target.compute_capability or "unknown"
                return f"torch's int4 kernel needs compute capability 8.0, this device's is {has}"
        return lacks_dtype(self.dtype, target)

    def cpu_control(self) -> str | None:
        """Unpacking bounds it: with AVX2 one core takes as long for int4 as for int8, a quarter of memmove's rate."""
        return "matmul"

    def build(self, device: str) -> Prepared:
        """Random whole numbers, scales that make y of size 1, and torch's kernel beside the dequantised product."""
        import torch

        if device == "meta":
            # torch's counter has no formula for these kernels; a product of the same shapes counts the same.
            source = random_source(device)
            x, weight = (random_tensor(shape, self.dtype, source) for shape in ((self.batch, self.k), (self.k, self.n)))
            return Prepared(step=partial(torch.mm, x, weight))
        layer = self._layer(device)
        step = _eight_bit_step(layer) if self.group is None else _four_bit_step(layer, self.group)
        # The product is made once: it takes as long as hundreds of steps, and is looked at before and after them.
        reference = cache(partial(self._product, device))
        return Prepared(step=step, reference=reference, resident_bytes=self._resident_bytes)

    def _layer(self, device: str) -> _Layer:
        """The same numbers each time."""
        import torch

        source = random_source(device)
        x = random_tensor((self.batch, self.k), self.dtype, source)
        if self.group is None:
            whole = random_tensor((self.n, self.k), "int8", source)
            return _Layer(x=x, whole=whole, scales=self._scales((self.n,), source))
        whole = random_integers((self.n, self.k), source, low=0, high=16, dtype=torch.int32)
        groups = (self.k // self.group, self.n)
        return _Layer(x=x, whole=whole, scales=self._scales(groups, source), offsets=self._scales(groups, source))

    def _scales(self, shape: tuple[int, ...], source: RandomSource) -> torch.Tensor:
        """Between a half and one and a half of what gives y a spread of about 1."""
        drawn = random_tensor(shape, "fp32", source).sigmoid() + 0.5
        scales: torch.Tensor = (drawn / (SPREAD[self.bits] * math.sqrt(self.k))).to(torch_dtype(self.dtype))
        return scales

    def _product(self, device: str) -> torch.Tensor:
        """x w' in fp32 with the dequantised weight, which is made for it and dropped again."""
        layer = self._layer(device)
        return (layer.x.float() @ layer.weight().T).to(layer.x.dtype)

    def _resident_bytes(self) -> int:
        """All but y."""
        return (self.work().nbytes or 0) - self.batch * self.n * dtype_of(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """x (batch, k), whole numbers (n, k), scales (n) or scales and offsets (groups, n)."""

    x: torch.Tensor
    whole: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    def weight(self) -> torch.Tensor:
        """(n, k) in fp32."""
        if self.offsets is None:
            return self.whole.float() * self.scales.float()[:, None]
        size = self.whole.shape[1] // self.scales.shape[0]
        scale, offset = (each.float().repeat_interleave(size, dim=0).T for each in (self.scales, self.offsets))
        return (self.whole.float() - ZERO_POINT) * scale + offset


def _eight_bit_step(layer: _Layer) -> Step:
    """torch's kernel on int8 as it is."""
    import torch

    kernel = torch.ops.aten._weight_int8pack_mm  # noqa: SLF001 - torch has no public one
    return partial(kernel, layer.x, layer.whole, layer.scales)


def _four_bit_step(layer: _Layer, group: int) -> Step:
    """torch's kernel on packed int4, scales and offsets side by side."""
    import torch

    assert layer.offsets is not None
    aten = torch.ops.aten
    scales = torch.stack([layer.scales, layer.offsets], dim=-1).contiguous()
    if layer.x.device.type == "cpu":
        packed = aten._convert_weight_to_int4pack_for_cpu(layer.whole, 1)  # noqa: SLF001 - torch has no public one
        return partial(aten._weight_int4pack_mm_for_cpu, layer.x, packed, group, scales)  # noqa: SLF001 - as above
    # For CUDA two values share a byte, the first one high, and up to 8 tiles of 16 inputs lie together.
    pairs = (layer.whole[:, ::2] << 4 | layer.whole[:, 1::2]).to(torch.uint8)
    tiles = next(tiles for tiles in (8, 4, 2) if layer.whole.shape[1] % (16 * tiles) == 0)
    packed = aten._convert_weight_to_int4pack(pairs, tiles)  # noqa: SLF001 - as above
    return partial(aten._weight_int4pack_mm, layer.x, packed, group, scales)  # noqa: SLF001 - as above
