"""The tensors of workloads: inputs of random numbers, outputs that betray work not done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfsuite.dtypes import dtype_of

if TYPE_CHECKING:
    import torch

SEED = 17


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that stores the data type ``name``."""
    import torch

    dtype: torch.dtype = getattr(torch, dtype_of(name).torch_name)
    return dtype


@dataclass(frozen=True, kw_only=True)
class RandomSource:
    """Where random numbers come from: a device, and its generator (None on ``meta``, whose tensors hold none)."""

    device: str
    generator: torch.Generator | None


def random_source(device: str) -> RandomSource:
    """A source on ``device`` with a fixed seed: every build gets the same numbers."""
    import torch

    generator = None if device == "meta" else torch.Generator(device=device).manual_seed(SEED)
    return RandomSource(device=device, generator=generator)


def random_tensor(shape: tuple[int, ...], dtype: str, source: RandomSource) -> torch.Tensor:
    """Normal numbers, or the whole range of int8, on the source's device.

    Never zeros: a GPU fed with zeros draws less power and ran 13 % faster.
    """
    import torch

    if dtype == "int8":
        return random_integers(shape, source, low=-128, high=128, dtype=torch.int8)
    stored = torch_dtype(dtype)
    drawn = stored if stored.itemsize > 1 else torch.float32  # there is no generator for 8-bit floats
    return torch.randn(shape, dtype=drawn, device=source.device, generator=source.generator).to(stored)


def random_integers(
    shape: tuple[int, ...], source: RandomSource, *, low: int, high: int, dtype: torch.dtype
) -> torch.Tensor:
    """Whole numbers from ``low`` to below ``high``, such as token ids."""
    import torch

    return torch.randint(low, high, shape, dtype=dtype, device=source.device, generator=source.generator)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """An output full of NaN, or of the smallest integer: what a step leaves untouched shows."""
    import torch

    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full(shape, value, dtype=dtype, device=device)
