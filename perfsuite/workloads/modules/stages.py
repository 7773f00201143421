"""One stage of a pipeline: some of a transformer's layers, with the embedding before or the loss after them."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from perfsuite.workloads.modules.transformer import Transformer
from perfsuite.workloads.routing import RoutedTokens


class Stage(nn.Module):
    """The layers ``layers`` of ``model``, which gives them up; parameters keep the names that they have there.

    The first stage takes token ids, the others the residual stream. The last returns the mean cross entropy, in fp32,
    as one number: a schedule keeps what the last stage returns until its step is over, and logits are large.
    """

    def __init__(
        self,
        model: Transformer,
        layers: range,
        *,
        routing: RoutedTokens | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.shape.layers
        self.routing, self.autocast = routing, autocast
        self.blocks = nn.ModuleDict({str(layer): model.blocks[layer] for layer in layers})
        if self.is_first:
            self.embedding = model.embedding
        if self.is_last:
            self.norm, self.head = model.norm, model.head
        # Kept out of the stage's own modules: it would bring all of the model's parameters with it.
        self.rotation_of, self.run = model.rotation, model.run

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """(batch, q_len) ids or (batch, q_len, d_model) to the latter, or to the loss, (1,), of ``targets``."""
        with nullcontext() if self.autocast is None else torch.autocast(x.device.type, dtype=self.autocast):
            if self.is_first:
                x = self.embedding(x)
            rotation = self.rotation_of(x, range(x.shape[1]))
            for block in self.blocks.values():
                x = self.run(block)(x, rotation=rotation, routing=self.routing)
            if not self.is_last:
                return x
            assert targets is not None
            logits = self.head(self.norm(x))
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).unsqueeze(0)
