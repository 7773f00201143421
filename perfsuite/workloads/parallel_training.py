"""A model that several ranks train together: their steps, and whether these do what one rank's would."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from perfsuite.workloads.exposure import BlockedMeter, profiled_share
from perfsuite.workloads.layout import Layout, local_tensors
from perfsuite.workloads.optimizers import state_tensors
from perfsuite.workloads.parallel import Parallel
from perfsuite.workloads.tensors import SEED
from perfsuite.workloads.training import CHECK_STEPS, FALLEN, SOME_TOKENS, Training

if TYPE_CHECKING:
    import torch

COMPARED_STEPS = 3
NORM_EPSILON = 1e-6
"""torch's own clipping adds as much to the norm that it divides by."""


class Passes(Protocol):
    """The forward and backward passes of one micro-batch."""

    def __call__(self, tokens: torch.Tensor, *, accumulate: int, last: bool) -> torch.Tensor:
        """Adds to the gradients those of the loss / ``accumulate``, which it returns.

        ``last`` exchanges the gradients with the ranks that train on other tokens.
        """


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """Passes through all layers: on a rank by itself, with DDP or FSDP2, or with every matrix divided."""

    model: Any
    loss_of: Callable[[torch.Tensor], torch.Tensor]
    parallel: Parallel

    def __call__(self, tokens: torch.Tensor, *, accumulate: int, last: bool) -> torch.Tensor:
        """As `Passes` says."""
        with self._exchange(last), self._divided_loss():
            loss: Any = self.loss_of(tokens) / accumulate
            loss.backward()
        (local,) = local_tensors([loss.detach()])
        return local

    def _exchange(self, last: bool) -> AbstractContextManager[None]:
        if self.parallel.replicates and not last:
            held: AbstractContextManager[None] = self.model.no_sync()
            return held
        if self.parallel.shards > 1:
            self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def _divided_loss(self) -> AbstractContextManager[None]:
        """The cross entropy of logits of which each rank has a part of the vocabulary."""
        if self.parallel.tensor == 1:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """Passes through the layers of one stage, all micro-batches of a pipeline at once, by torch's schedule."""

    schedule: Any
    layout: Layout

    def __call__(self, tokens: torch.Tensor, *, accumulate: int, last: bool) -> torch.Tensor:
        """As `Passes` says; 0 from all stages but the last. There is nothing to accumulate beside micro-batches."""
        import torch

        place, end = self.layout.place("pipeline"), self.layout.parallel.pipeline - 1
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        losses: list[torch.Tensor] = []
        if place == 0:
            self.schedule.step(inputs)
        elif place == end:
            self.schedule.step(targets=targets, target=targets, losses=losses)
        else:
            self.schedule.step()
        return torch.stack(losses).mean() if losses else torch.zeros((), device=tokens.device)


@dataclass(kw_only=True)
class Past:
    """What a training has been through: steps on new tokens, and whether these were held against one rank's."""

    steps: int = 0
    compared: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelTraining:
    """This rank's part of a training that a group does together, and the same training on one rank to hold it to.

    ``alone`` builds a one-rank training of the same model that accumulates as many micro-batches as it is told.
    """

    layout: Layout
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    passes: Passes
    tokens: torch.Tensor
    """Where new ids are drawn to: those of one micro-batch."""
    vocab: int
    accumulate: int
    clip: float | None
    tolerance: float
    alone: Callable[[int], Training] | None
    meter: BlockedMeter
    past: Past = field(default_factory=Past)

    def step(self, fetch: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One optimizer step on as many micro-batches of ``fetch`` as are accumulated; this rank's mean loss."""
        import torch

        with self.meter.step():
            total = torch.zeros((), device=self.tokens.device)
            for number in range(1, self.accumulate + 1):
                last = number % self.layout.parallel.sync_every == 0
                total += self.passes(fetch(), accumulate=self.accumulate, last=last).detach()
            if self.clip is not None:
                self._clip(self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return total

    def step_on_new_tokens(self) -> torch.Tensor:
        """A step on tokens that were never there before; ranks of one replica draw the same ones."""
        self.past.steps += 1
        return self.step(lambda: self.tokens.random_(0, self.vocab, generator=self._generator))

    @cached_property
    def _generator(self) -> torch.Generator:
        return self._source(self.layout.place("data"))

    def _source(self, replica: int) -> torch.Generator:
        """Where a replica's tokens come from."""
        import torch

        return torch.Generator(self.tokens.device).manual_seed(SEED + replica)

    @cached_property
    def _copies(self) -> list[tuple[torch.nn.Parameter, int]]:
        """The parameters, and on how many of the ranks whose norms are added up each is the same."""
        tensor = self.layout.parallel.tensor
        if tensor == 1:
            return [(each, 1) for each in self.model.parameters()]
        from perfsuite.workloads.modules.sharding import is_divided

        return [(each, 1 if is_divided(name) else tensor) for name, each in self.model.named_parameters()]

    def _clip(self, clip: float) -> None:
        """Scale the gradients of the whole model down to the norm ``clip``, as one rank with all of them would."""
        import torch
        from torch import distributed

        held = [(each.grad, copies) for each, copies in self._copies if each.grad is not None]
        gradients = local_tensors(gradient for gradient, _ in held)
        norms = torch._foreach_norm(gradients)  # noqa: SLF001 - torch's own clipping calls it, and has no name for it
        copies = torch.tensor([count for _, count in held], device=self.tokens.device)
        square = (torch.stack(norms).float().square() / copies).sum()
        for group in self.layout.norm_groups():
            distributed.all_reduce(square, group=group)
        factor = (clip / (square.sqrt() + NORM_EPSILON)).clamp(max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))

    def check(self) -> str | None:
        """Why the training cannot be believed: other losses than one rank's, or a loss that does not fall.

        A collective call; every rank comes to the same conclusion.
        """
        return self._difference() or self._no_lesson()

    def _difference(self) -> str | None:
        """Whether three steps on a fixed batch have the losses that they have on one rank; the first check finds out.

        A batch that stays is learnt, so that gradients which were not exchanged show in the next loss.
        """
        if self.alone is None or self.past.compared:
            return None
        self.past.compared = True
        size, batches = self.layout.parallel.data_size, self._fixed()
        place = self.layout.place("data")
        mine = batches[place * self.accumulate : (place + 1) * self.accumulate]
        ours = [self._mean_loss(mine) for _ in range(COMPARED_STEPS)]
        theirs = [0.0] * COMPARED_STEPS
        if not any(map(self.layout.place, ("data", "pipeline", "tensor"))):
            training = self._caught_up(self.alone(size * self.accumulate))
            theirs = [float(training.step(iter(batches).__next__)) for _ in range(COMPARED_STEPS)]
        theirs = [self.layout.gather(loss)[0] for loss in theirs]
        for number, (our, their) in enumerate(zip(ours, theirs, strict=True), start=1):
            if not abs(our - their) <= self.tolerance * abs(their):
                return f"the loss of the group's step {number} is {our:.6g}, that of one rank's {their:.6g}"
        return None

    def _caught_up(self, training: Training) -> Training:
        """One rank's training after the steps that the group's has made, on all replicas' tokens."""
        import torch

        sources = [self._source(replica) for replica in range(self.layout.parallel.data_size)]
        for _ in range(self.past.steps):
            drawn = (
                torch.empty_like(self.tokens).random_(0, self.vocab, generator=source)
                for source in sources
                for _ in range(self.accumulate)
            )
            training.step(drawn.__next__)
        return training

    def _no_lesson(self) -> str | None:
        """Whether the loss of a fixed batch does not fall."""
        place = self.layout.place("data")
        mine = self._fixed()[place * self.accumulate : (place + 1) * self.accumulate]
        first, *_, last = (self._mean_loss(mine) for _ in range(CHECK_STEPS))
        if last <= FALLEN * first:
            return None
        return f"the loss did not fall over {CHECK_STEPS} steps of a fixed batch: {first:.6g} first, {last:.6g} last"

    def _mean_loss(self, batches: list[torch.Tensor]) -> float:
        return self.layout.mean(float(self.step(iter(batches).__next__)))

    def _fixed(self) -> list[torch.Tensor]:
        """Every micro-batch of the whole group, the same on each rank, of few enough tokens to learn something."""
        import torch

        source = torch.Generator(self.tokens.device).manual_seed(0)
        return [
            torch.empty_like(self.tokens).random_(0, max(self.vocab // SOME_TOKENS, 2), generator=source)
            for _ in range(self.layout.parallel.data_size * self.accumulate)
        ]

    def shares(self) -> dict[str, float]:
        """``exposed_communication``, the ranks' mean, and a pipeline's ``bubble``. A collective call.

        On a CPU a pipeline's ranks are blocked in the bubble too: the exposed communication is what goes beyond it.
        """
        kind = self.tokens.device.type
        own = self.meter.share() if kind == "cpu" else profiled_share(self.step_on_new_tokens, kind)
        found = self.layout.gather(-1.0 if own is None else own)
        bubble = self.layout.parallel.bubble
        shares = {} if bubble is None else {"bubble": bubble}
        if min(found) < 0:
            return shares
        exposed = sum(found) / len(found)
        if bubble is not None and kind == "cpu":
            exposed = max(exposed - bubble, 0.0)
        return {"exposed_communication": exposed, **shares}

    def resident_bytes(self) -> int:
        """This rank's parameters, DDP's buckets, optimizer state and token ids."""
        parameters = local_tensors(self.model.parameters())
        held = sum(each.nbytes for each in (*parameters, self.tokens))
        buckets = sum(each.nbytes for each in parameters) if self.layout.parallel.replicates else 0
        return held + buckets + sum(each.nbytes for each in local_tensors(state_tensors(self.optimizer)))
