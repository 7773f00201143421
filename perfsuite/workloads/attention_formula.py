"""Attention written out, softmax(q k' / sqrt(head_dim)) v and its gradients, to hold a kernel's results against."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfsuite.workloads.tensors import torch_dtype

if TYPE_CHECKING:
    import torch

NAMES = ("output", "gradient of q", "gradient of k", "gradient of v")

CHECKED_SCORES = 2**23
"""Heads are left out beyond so many scores in all, down to one head of keys with the queries that share it."""
ROWS = 1024
"""Scores are made for so many queries at a time: 64 MiB a head for 16384 keys."""
COMPARED_ROWS = 256
"""The norms of so many rows are compared at a time: under a causal mask late rows are far smaller than early ones."""
ROUNDINGS = 4
"""How many times the epsilon of its data type, and the usual error of its sums, a result may be off."""
TF32_EPSILON = 2.0**-10


@dataclass(frozen=True, kw_only=True)
class AttentionTensors:
    """q (batch, heads, q_len, head_dim), k and v (batch, kv_heads, kv_len, head_dim); ``gradient`` is the output's."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gradient: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Formula:
    """The formula on ``tensors`` in fp32, and in fp64 for inputs whose products may be fp64 or TF32.

    ``ahead`` is how many keys the first query sees before its own; None where nothing is masked.
    """

    tensors: AttentionTensors
    dtype: str
    ahead: int | None

    def fault(self, results: torch.Tensor | Sequence[torch.Tensor]) -> str | None:
        """What is wrong with a step's output, or with its output and gradients, in one line; None where nothing is."""
        each = (results,) if self.tensors.gradient is None else tuple(results)
        for sequence, key_head in self.groups():
            heads = self._heads(key_head)
            places = (heads, heads, key_head, key_head)
            for name, result, place, wanted in zip(NAMES, each, places, self._group(sequence, key_head), strict=False):
                if fault := self._difference(result.detach()[sequence, place], wanted):
                    return f"the {name} is not the formula's: of sequence {sequence}, key head {key_head}, {fault}"
        return None

    def groups(self) -> Iterator[tuple[int, int]]:
        """(sequence, key head) of what is looked at: all of them, or evenly spaced ones from the last down."""
        batch, kv_heads, keys, _ = self.tensors.key.shape
        scores = self.tensors.query.shape[1] // kv_heads * self.tensors.query.shape[2] * keys
        spacing = math.ceil(batch * kv_heads / max(CHECKED_SCORES // scores, 1))
        for group in range(batch * kv_heads - 1, -1, -spacing):
            yield divmod(group, kv_heads)

    def _heads(self, key_head: int) -> slice:
        """The query heads that share a head of keys."""
        share = self.tensors.query.shape[1] // self.tensors.key.shape[1]
        return slice(key_head * share, (key_head + 1) * share)

    def _group(self, sequence: int, key_head: int) -> tuple[torch.Tensor, ...]:
        """Output, and with a gradient of it those of q, k and v, for one head of keys and the queries that share it."""
        import torch

        wide = torch.float64 if self.dtype in ("fp64", "tf32") else torch.float32
        trained = self.tensors.gradient is not None
        query, key, value = (
            tensor.detach()[sequence, place].to(wide).requires_grad_(trained)
            for tensor, place in (
                (self.tensors.query, self._heads(key_head)),
                (self.tensors.key, key_head),
                (self.tensors.value, key_head),
            )
        )
        outputs, gradients = [], []
        for start in range(0, query.shape[1], ROWS):
            rows = slice(start, start + ROWS)
            out = self._attended(query[:, rows], key, value, start)
            outputs.append(out.detach())
            if self.tensors.gradient is not None:
                given = self.tensors.gradient[sequence, self._heads(key_head), rows].to(wide)
                gradients.append(torch.autograd.grad(out, (query, key, value), given))
        return (torch.cat(outputs, dim=1), *(torch.stack(parts).sum(0) for parts in zip(*gradients, strict=True)))

    def _attended(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int) -> torch.Tensor:
        """The formula for (heads, rows, head_dim) queries from row ``start`` on."""
        import torch

        scores = query @ key.mT / math.sqrt(query.shape[-1])
        if self.ahead is not None:
            row = torch.arange(start, start + query.shape[1], device=key.device)[:, None]
            hidden = torch.arange(key.shape[0], device=key.device) > row + self.ahead
            scores = scores.masked_fill(hidden, -math.inf)
        return torch.softmax(scores, dim=-1) @ value

    def _difference(self, result: torch.Tensor, wanted: torch.Tensor) -> str | None:
        """Which rows are further off than rounding explains, and by how much; None where none are."""
        for start in range(0, wanted.shape[-2], COMPARED_ROWS):
            ours, theirs = (each[..., start : start + COMPARED_ROWS, :].to(wanted.dtype) for each in (result, wanted))
            error, norm = float((ours - theirs).norm()), float(theirs.norm())
            # Gradients can cancel out where there are few keys, their rounding cannot: beside its norm a result may be
            # off by elements of size 1/keys, a single key's share.
            if not error <= self.tolerance * (norm + math.sqrt(theirs.numel()) / self._terms):
                last = start + theirs.shape[-2] - 1
                return f"rows {start} to {last} are off by {error:.2g}, their norm is {norm:.2g}"
        return None

    @property
    def _terms(self) -> int:
        """Of how many terms the longest sum is."""
        return max(self.tensors.query.shape[2], self.tensors.key.shape[2])

    @property
    def tolerance(self) -> float:
        """The share of its norm that a result may be off: roundings to its data type, and a long sum's usual error."""
        import torch

        stored = TF32_EPSILON if self.dtype == "tf32" else torch.finfo(torch_dtype(self.dtype)).eps
        summed = torch.finfo(torch.float64 if self.dtype == "fp64" else torch.float32).eps
        return ROUNDINGS * (stored + summed * math.sqrt(self._terms))
