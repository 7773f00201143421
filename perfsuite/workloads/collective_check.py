"""What a collective operation has to yield, from every rank's inputs made anew: no operation checks itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfsuite.workloads.tensors import SEED

if TYPE_CHECKING:
    import torch

ROOT = 0
"""The rank that broadcasts, and that reduces."""


def fill_input(buffer: torch.Tensor, *, rank: int, ranks: int) -> torch.Tensor:
    """``buffer`` with the random numbers of ``rank``, from -1 to 1, the same at every call.

    They are multiples of a power of two so large that the sum over all ranks is exact, in whatever order it is made.
    """
    import torch

    generator = torch.Generator(device=buffer.device).manual_seed(SEED + rank)
    exact = int(2 / torch.finfo(buffer.dtype).eps)  # whole numbers up to here have no gaps
    steps = max(exact >> (ranks - 1).bit_length(), 1)
    return buffer.random_(-steps, steps, generator=generator).div_(steps)


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """An operation of ``ranks``, each of which puts in a tensor such as ``example``, whose numbers are not read."""

    operation: str
    example: torch.Tensor
    ranks: int

    def result(self, rank: int) -> torch.Tensor | None:
        """What ``rank`` holds after it; None where that is not said, as of a reduce anywhere but at its root."""
        if self.operation in ("broadcast", "send_recv"):
            return self._input(ROOT if self.operation == "broadcast" else (rank - 1) % self.ranks)
        if self.operation == "all_gather":
            return self._gathered()
        if self.operation == "all_to_all":
            return self._exchanged(rank)
        if self.operation == "reduce_scatter":
            return self._share(self._sum(), rank)
        return self._sum() if self.operation == "all_reduce" or rank == ROOT else None

    def _input(self, rank: int) -> torch.Tensor:
        import torch

        return fill_input(torch.empty_like(self.example), rank=rank, ranks=self.ranks)

    def _sum(self) -> torch.Tensor:
        """The sum of all inputs."""
        total = self._input(0)
        for rank in range(1, self.ranks):
            total += self._input(rank)
        return total

    def _gathered(self) -> torch.Tensor:
        import torch

        return torch.cat([self._input(rank) for rank in range(self.ranks)])

    def _exchanged(self, rank: int) -> torch.Tensor:
        """Of every rank's input the share for ``rank``."""
        import torch

        return torch.cat([self._share(self._input(other), rank) for other in range(self.ranks)])

    def _share(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A copy, so that the whole need not be kept."""
        return whole.view(self.ranks, -1)[rank].clone()
