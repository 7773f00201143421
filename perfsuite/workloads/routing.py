"""Which experts of a mixture each token goes to, decided by arithmetic alone so that every run does the same work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

from perfsuite.errors import CaseError
from perfsuite.workloads.base import one_of, positive_int
from perfsuite.workloads.tensors import SEED

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

KINDS = ("balanced", "skewed")
DRAWN = 65536
"""For so many tokens are experts drawn at once."""


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
    def choices(self) -> NDArray[np.int64]:
        """The experts of each token, (tokens, active), before anything is dropped."""
        import numpy as np

        if self.kind == "balanced":
            return (np.arange(self.tokens * self.active, dtype=np.int64) % self.experts).reshape(
                self.tokens, self.active
            )
        return np.concatenate(list(self._draws()))

    def _draws(self) -> Iterator[NDArray[np.int64]]:
        """Different experts for some tokens after others: by weight, those that win a race at exponential times.

        The old generator's numbers are the same in every version of numpy.
        """
        import numpy as np

        source = np.random.RandomState(self.seed)
        for first in range(0, self.tokens, DRAWN):
            size = (min(DRAWN, self.tokens - first), self.experts)
            times = source.standard_exponential(size) * np.arange(1, self.experts + 1)
            yield times.argsort(axis=-1, kind="stable")[:, : self.active].astype(np.int64)

    @cached_property
    def wanted(self) -> tuple[int, ...]:
        """How many tokens go to each expert, before anything is dropped; found without keeping a number of each."""
        import numpy as np

        if self.kind == "balanced":
            each, more = divmod(self.tokens * self.active, self.experts)
            return tuple(each + (expert < more) for expert in range(self.experts))
        counts = np.zeros(self.experts, dtype=np.int64)
        for drawn in self._draws():
            counts += np.bincount(drawn.ravel(), minlength=self.experts)
        return tuple(counts.tolist())

    @property
    def capacity(self) -> int:
        """How many tokens one expert takes at most."""
        if self.capacity_factor is None:
            return self.tokens
        # As a fraction, since 1.1 * 10 is above 11 in binary.
        return math.ceil(Fraction(str(self.capacity_factor)) * self.tokens * self.active / self.experts)

    @cached_property
    def pairs(self) -> tuple[NDArray[np.int64], ...]:
        """The pairs that each expert computes; a token's pair with its n-th expert is number token * active + n."""
        import numpy as np

        chosen = self.choices.ravel()
        return tuple(np.flatnonzero(chosen == expert)[: self.capacity] for expert in range(self.experts))

    def assignments(self) -> list[NDArray[np.int64]]:
        """The tokens that each expert computes."""
        return [pairs // self.active for pairs in self.pairs]

    @property
    def kept(self) -> int:
        """How many (token, expert) pairs are computed."""
        return sum(min(wanted, self.capacity) for wanted in self.wanted)

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

    def indices(arrays: Iterable[NDArray[np.int64]]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.tensor(array, device=device) for array in arrays)

    chosen = torch.tensor(routing.choices, device=device)
    return RoutedTokens(chosen=chosen, tokens=indices(routing.assignments()), pairs=indices(routing.pairs))
