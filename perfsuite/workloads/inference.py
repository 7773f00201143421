"""Generating text: prefill of a prompt, and decoding one token after it, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from perfsuite.flops import layer_parts, model_flops, repeated
from perfsuite.workloads.base import Prepared, positive_int
from perfsuite.workloads.generation import Generation, as_executed

REFERENCE_FLOPS = {"cpu": 3e10}
"""A prefill that takes no longer than this checks a decoding step; it runs three times."""
REFERENCE_FLOPS_GPU = 1e13


@dataclass(frozen=True, kw_only=True)
class Prefill(Generation):
    """The prompt's pass: ``seq_len`` tokens of each sequence fill the cache, and the last one's logits come out."""

    kind = "prefill"

    seq_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positions("seq_len", positive_int("Prefill", "seq_len", self.seq_len))

    @property
    def q_len(self) -> int:
        """The whole prompt."""
        return self.seq_len

    @property
    def kv_len(self) -> int:
        """The whole prompt."""
        return self.seq_len

    def cpu_control(self) -> str | None:
        """Matmuls are most of its time."""
        return "matmul"

    def build(self, device: str) -> Prepared:
        """Random tokens, and a cache that every step fills anew; the reference of a compiled model is the plain one."""
        session = self.session(device, length=self.seq_len)
        step, plain = (
            partial(session.logits, model, session.tokens, start=0)
            for model in (as_executed(session.model, self.execution, device), session.model)
        )
        reference = plain if self.execution == "compile" else None
        return Prepared(step=step, reference=reference, resident_bytes=session.resident_bytes)


@dataclass(frozen=True, kw_only=True)
class Decode(Generation):
    """One more token for each sequence that has ``context`` positions in the cache, the same position in every step."""

    kind = "decode"
    metric = "mbu"

    context: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positions("context", positive_int("Decode", "context", self.context))

    @property
    def q_len(self) -> int:
        """One token."""
        return 1

    @property
    def kv_len(self) -> int:
        """The context and the new token."""
        return self.context + 1

    def cpu_control(self) -> str | None:
        """Reading the weights and the cache is the work."""
        return "memmove"

    def build(self, device: str) -> Prepared:
        """A cache filled by a prefill, whose logits are the reference, or with random numbers where that takes long."""
        session = self.session(device, length=self.kv_len)
        last = session.tokens[:, -1:].clone()
        model = as_executed(session.model, self.execution, device)
        step = partial(session.logits, model, last, start=self.context)
        reference: Callable[[], Any] | None = None
        if self._affordable(device):
            session.logits(session.model, session.tokens[:, :-1], start=0)
            reference = partial(session.model, session.tokens, last_only=True)
        else:
            session.cache.store.normal_(generator=session.source.generator)
            if self.execution == "compile":
                reference = partial(session.logits, session.model, last, start=self.context)
        return Prepared(step=step, reference=reference, resident_bytes=session.resident_bytes)

    def _affordable(self, device: str) -> bool:
        """Whether a prefill of all positions can be the reference; in a mixture it would use other experts."""
        if self.shape.experts or device == "meta":
            return False
        layer = layer_parts(self.shape, batch=self.batch, q_len=self.kv_len)
        return model_flops(repeated(layer, self.shape.layers)) <= REFERENCE_FLOPS.get(device, REFERENCE_FLOPS_GPU)
