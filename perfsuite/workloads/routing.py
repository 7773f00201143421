"""Which experts of a mixture each token goes to, decided by arithmetic alone so that every run does the same work."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

from perfsuite.errors import CaseError
from perfsuite.workloads.base import one_of, positive_int
from perfsuite.workloads.tensors import SEED

if TYPE_CHECKING:
    import torch

KINDS = ("balanced", "skewed")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where ``tokens`` tokens go among ``experts``, ``active`` different ones each.

    ``balanced`` deals the (token, expert) pairs out in turn, so that the experts' shares differ by one at most.
    ``skewed`` draws the experts with Zipf's weights 1, 1/2, 1/3, ... from ``seed``. An expert takes at most
    ceil(capacity_factor * tokens * active / experts) tokens, the first ones, and drops the rest; None drops nothing.
    A CaseError names what cannot be.
    """

    tokens: int
    experts: int
    active: int
    kind: str = "balanced"
    capacity_factor: float | None = None
    seed: int = SEED

    def __post_init__(self) -> None:
        for name in ("tokens", "experts", "active"):
            positive_int("routing", name, getattr(self, name))
        if self.active > self.experts:
            raise CaseError(f"routing: active={self.active} must not exceed experts={self.experts}")
        one_of("routing", "kind", self.kind, KINDS)
        self._check_capacity(self.capacity_factor)

    def _check_capacity(self, factor: Any) -> None:
        """A CaseError unless it is None or a finite number above 0."""
        is_number = isinstance(factor, Real) and not isinstance(factor, bool)
        if factor is not None and not (is_number and 0 < factor < math.inf):
            raise CaseError(f"routing: capacity_factor={factor!r} must be a number above 0, or None to drop nothing")

    @cached_property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """The experts of each token, before anything is dropped."""
        if self.kind == "balanced":
            return tuple(
                tuple((token * self.active + slot) % self.experts for slot in range(self.active))
                for token in range(self.tokens)
            )
        source = random.Random(self.seed)
        return tuple(self._draw(source) for _ in range(self.tokens))

    def _draw(self, source: random.Random) -> tuple[int, ...]:
        """Different experts, by weight: those that win a race whose times are exponential with these rates."""
        times = [source.expovariate(1 / (expert + 1)) for expert in range(self.experts)]
        return tuple(sorted(range(self.experts), key=times.__getitem__)[: self.active])

    @property
    def capacity(self) -> int:
        """How many tokens one expert takes at most."""
        if self.capacity_factor is None:
            return self.tokens
        # As a fraction, since 1.1 * 10 is above 11 in binary.
        return math.ceil(Fraction(str(self.capacity_factor)) * self.tokens * self.active / self.experts)

    @cached_property
    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """The pairs that each expert computes; a token's pair with its n-th expert is number token * active + n."""
        found: list[list[int]] = [[] for _ in range(self.experts)]
        for token, experts in enumerate(self.choices):
            for slot, expert in enumerate(experts):
                found[expert].append(token * self.active + slot)
        return tuple(tuple(pairs[: self.capacity]) for pairs in found)

    def assignments(self) -> list[list[int]]:
        """The tokens that each expert computes."""
        return [[pair // self.active for pair in pairs] for pairs in self.pairs]

    @property
    def kept(self) -> int:
        """How many (token, expert) pairs are computed."""
        return sum(map(len, self.pairs))

    @property
    def dropped(self) -> int:
        """How many (token, expert) pairs are not computed since the expert was full."""
        return self.tokens * self.active - self.kept


@dataclass(frozen=True, kw_only=True)
class RoutedTokens:
    """A routing as index tensors: the experts of each token, (tokens, active), and the pairs of each expert.

    ``tokens`` are the rows of ``chosen`` that an expert computes, ``pairs`` their places in ``chosen`` flattened.
    """

    chosen: torch.Tensor
    tokens: tuple[torch.Tensor, ...]
    pairs: tuple[torch.Tensor, ...]


def prepare(routing: Routing, device: str) -> RoutedTokens:
    """The routing's index tensors on a torch device."""
    import torch

    def indices(lists: Iterable[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in lists)

    chosen = torch.tensor(routing.choices, device=device)
    return RoutedTokens(chosen=chosen, tokens=indices(routing.assignments()), pairs=indices(routing.pairs))
