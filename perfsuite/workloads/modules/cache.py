"""The keys and values of positions already seen, so that decoding need not compute them again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perfsuite.errors import CaseError
from perfsuite.models import ModelShape


class KeyValueCache:
    """Keys and values of all layers in one tensor, ``store``: (layers, 2, batch, kv_heads, length, head_dim).

    Meant for inference: what is written to it is not differentiated.
    """

    def __init__(
        self, shape: ModelShape, *, batch: int, length: int, layers: int, device: str, dtype: torch.dtype
    ) -> None:
        self.length = length
        self.store = torch.zeros((layers, 2, batch, shape.kv_heads, length, shape.head_dim), device=device, dtype=dtype)

    def update(self, layer: int, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write (batch, kv_heads, q_len, head_dim) from position ``start`` on, and return all positions up to there.

        A CaseError says where the cache is too short.
        """
        end = start + keys.shape[-2]
        if end > self.length:
            raise CaseError(f"cache: length={self.length} must be at least {end} to hold {end} positions")
        held = self.store[layer, :, :, :, :end]
        held[0, :, :, start:] = keys
        held[1, :, :, start:] = values
        return held[0], held[1]

    def at(self, layer: int, start: int) -> LayerCache:
        """What one layer's attention sees of it in a forward pass that begins at position ``start``."""
        return LayerCache(cache=self, layer=layer, start=start)


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """One layer of a cache, and the position at which the tokens of a forward pass begin."""

    cache: KeyValueCache
    layer: int
    start: int

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values of new positions, and return those of all positions up to there."""
        return self.cache.update(self.layer, keys, values, self.start)
