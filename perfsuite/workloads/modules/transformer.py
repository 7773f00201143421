"""A whole decoder-only transformer, and the numbers that it starts with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from perfsuite.errors import CaseError
from perfsuite.models import ModelShape
from perfsuite.workloads.modules.cache import KeyValueCache
from perfsuite.workloads.modules.layers import Block, Rotation, norm_for, rotation_for
from perfsuite.workloads.routing import RoutedTokens

DEVIATION = 0.02


class Transformer(nn.Module):
    """Embedding, blocks, norm and output head; a tied head is the embedding's own parameter.

    With ``checkpoint`` the backward pass computes each block's activations again instead of keeping them.
    """

    def __init__(self, shape: ModelShape, *, device: str, dtype: torch.dtype, checkpoint: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.checkpoint = checkpoint
        self.embedding = nn.Embedding(shape.vocab, shape.d_model, device=device, dtype=dtype)
        if shape.positions:
            self.positions = nn.Embedding(shape.positions, shape.d_model, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(Block(shape, device=device, dtype=dtype) for _ in range(shape.layers))
        self.norm = norm_for(shape, device=device, dtype=dtype)
        self.head = nn.Linear(shape.d_model, shape.vocab, bias=False, device=device, dtype=dtype)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        *,
        cache: KeyValueCache | None = None,
        start: int = 0,
        last_only: bool = False,
        routing: RoutedTokens | None = None,
    ) -> Tensor:
        """The logits, (batch, q_len, vocab), of ``tokens``, (batch, q_len); the last position's with ``last_only``.

        With a cache the tokens are at positions from ``start`` on, and see those before. ``routing`` is every
        mixture's. A CaseError says which positions the model or the cache does not have.
        """
        positions = range(start, start + tokens.shape[1])
        x = self._embed(tokens, positions)
        rotation = self.rotation(x, positions)
        for layer, block in enumerate(self.blocks):
            held = None if cache is None else cache.at(layer, start)
            x = self.run(block)(x, rotation=rotation, cache=held, routing=routing)
        return self.head(self.norm(x[:, -1:] if last_only else x))  # type: ignore[no-any-return] # untyped in torch

    def run(self, block: nn.Module) -> Callable[..., Tensor]:
        """The block, made to recompute where that is asked for; no generator's state is kept, as none is used."""
        return partial(recomputed, block, use_reentrant=False, preserve_rng_state=False) if self.checkpoint else block

    def _embed(self, tokens: Tensor, positions: range) -> Tensor:
        """(batch, q_len, d_model), with learned positions where the model has them."""
        x: Tensor = self.embedding(tokens)
        if not self.shape.positions:
            return x
        if positions.stop > self.shape.positions:
            raise CaseError(f"transformer: {positions.stop} tokens are more than positions={self.shape.positions}")
        return x + self.positions.weight[positions.start : positions.stop]

    def rotation(self, x: Tensor, positions: range) -> Rotation | None:
        """Rotary positions for models of Llama's kind."""
        if not self.shape.gated:
            return None
        return rotation_for(self.shape, positions=positions, device=x.device, dtype=x.dtype)


def initialize(module: nn.Module, seed: int) -> None:
    """Set GPT-2's starting numbers from ``seed``: matrices normal with deviation 0.02, norms 1, biases 0.

    On ``meta``, where tensors hold no numbers, nothing is done.
    """
    parameters = dict(module.named_parameters())
    device = next(iter(parameters.values())).device
    if device.type == "meta":
        return
    source = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in parameters.items():
            _draw(name, parameter, source)


def drawn(module: nn.Module, seed: int, *, device: str) -> Iterator[tuple[str, Tensor]]:
    """The numbers that `initialize` would set on ``device``, parameter by parameter; the module may be on ``meta``."""
    source = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in module.named_parameters():
        full = torch.empty_like(parameter, device=device, requires_grad=False)
        _draw(name, full, source)
        yield name, full


def _draw(name: str, parameter: Tensor, source: torch.Generator) -> None:
    if parameter.ndim > 1:
        parameter.normal_(std=DEVIATION, generator=source)
    else:
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
