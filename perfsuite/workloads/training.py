"""A model that is being trained: its steps, and whether they teach it anything."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perfsuite.workloads.optimizers import state_bytes

if TYPE_CHECKING:
    import torch

    from perfsuite.workloads.routing import RoutedTokens

CHECK_STEPS = 10
FALLEN = 0.99
"""The loss has to fall to this share of its first value; weight decay alone moves it by less."""
SOME_TOKENS = 8
"""The batch that is learnt uses one in so many of the vocabulary's tokens: something to learn, however large it is."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, its optimizer, and the loss of (batch, seq_len + 1) token ids, which is compiled or as it is written.

    ``eager_loss_of`` is the loss as it is written where ``loss_of`` is compiled; theirs may differ by ``tolerance``.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss_of: Callable[[torch.Tensor], torch.Tensor]
    eager_loss_of: Callable[[torch.Tensor], torch.Tensor] | None
    tolerance: float
    tokens: torch.Tensor
    """Where new ids are drawn to."""
    generator: torch.Generator | None
    vocab: int
    accumulate: int
    clip: float | None

    def step(self, fetch: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One optimizer step on as many micro-batches of ``fetch`` as are accumulated; their mean loss."""
        import torch

        total = torch.zeros((), device=self.tokens.device)
        for _ in range(self.accumulate):
            loss = self.loss_of(fetch()) / self.accumulate
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            total += loss.detach()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def step_on_new_tokens(self) -> torch.Tensor:
        """A step on tokens that were never there before, so that none is known by heart and gradients keep their size.

        Gradients that fade away become subnormal numbers, with which a CPU computes many times more slowly.
        """
        return self.step(self._drawn)

    def _drawn(self, one_in: int = 1) -> torch.Tensor:
        """New ids, from the first ``one_in``-th of the vocabulary."""
        return self.tokens.random_(0, max(self.vocab // one_in, 2), generator=self.generator)

    def check(self) -> str | None:
        """Why the training cannot be believed: another loss than the eager model's, or one that does not fall."""
        fixed = self._drawn(SOME_TOKENS).clone()
        if reason := self._difference(fixed):
            return reason
        first, *_, last = (float(self.step(lambda: fixed)) for _ in range(CHECK_STEPS))
        if last <= FALLEN * first:
            return None
        return f"the loss did not fall over {CHECK_STEPS} steps of a fixed batch: {first:.6g} first, {last:.6g} last"

    def _difference(self, tokens: torch.Tensor) -> str | None:
        """Whether compiling has changed what the model computes."""
        import torch

        if self.eager_loss_of is None:
            return None
        ours = float(self.loss_of(tokens).detach())
        with torch.no_grad():
            eager = float(self.eager_loss_of(tokens))
        if abs(ours - eager) <= self.tolerance * abs(eager):
            return None
        return f"the compiled model's loss is {ours:.6g}, that of the eager one {eager:.6g}"

    def resident_bytes(self) -> int:
        """Parameters, optimizer state and token ids."""
        held = (*self.model.parameters(), self.tokens)
        return sum(each.nbytes for each in held) + state_bytes(self.optimizer)


def loss_function(
    model: Any, routing: RoutedTokens | None, *, autocast: torch.dtype | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The mean cross entropy of every token's successor, in fp32; the model's matmuls in ``autocast`` where given."""
    import torch
    from torch.nn import functional

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with nullcontext() if autocast is None else torch.autocast(tokens.device.type, dtype=autocast):
            logits = model(tokens[:, :-1], routing=routing)
            return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return loss_of
