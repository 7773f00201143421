"""What prefill and decoding share: a whole model, its cache of keys and values, and their work."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from perfsuite.dtypes import dtype_of
from perfsuite.errors import CaseError
from perfsuite.flops import Parts, head_part, layer_parts, repeated
from perfsuite.footprint import INDEX_BYTES, kv_cache_bytes, layer_activations
from perfsuite.models import ModelShape, model_shape
from perfsuite.workloads.base import (
    Description,
    Target,
    Work,
    Workload,
    lacks_dtype,
    one_of,
    positive_int,
    work_of_parts,
)
from perfsuite.workloads.execution import EXECUTIONS, compiled, launch_of, why_not
from perfsuite.workloads.routing import Routing, prepare
from perfsuite.workloads.tensors import SEED, RandomSource, random_integers, random_source, torch_dtype
from perfsuite.workloads.transformer import DEVIATION, DTYPES, TOLERANCES, router_dtype, touched_parameters

if TYPE_CHECKING:
    from torch import Tensor

    from perfsuite.workloads.modules.cache import KeyValueCache
    from perfsuite.workloads.modules.transformer import Transformer
    from perfsuite.workloads.routing import RoutedTokens


@dataclass(frozen=True, kw_only=True)
class Generation(Workload):
    """A pass of the preset ``model``, with ``layers`` of its layers, on ``batch`` sequences; nothing is differentiated.

    Mixtures are routed in balance, so that a step reads min(experts, tokens * active experts) of a layer's experts.
    """

    model: str
    batch: int = 1
    layers: int | None = None
    execution: str = "eager"

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        positive_int(name, "batch", self.batch)
        if self.layers is not None:
            positive_int(name, "layers", self.layers)
        one_of(name, "execution", self.execution, EXECUTIONS)
        one_of(name, "dtype", self.dtype, DTYPES)
        model_shape(self.model)

    @property
    @abstractmethod
    def q_len(self) -> int:
        """New tokens of each sequence."""

    @property
    @abstractmethod
    def kv_len(self) -> int:
        """Positions of each sequence after the step."""

    @cached_property
    def shape(self) -> ModelShape:
        """The preset with as many layers as asked for."""
        return model_shape(self.model, layers=self.layers)

    @cached_property
    def routed(self) -> Routing | None:
        """Which experts the tokens go to, in every layer; None in a dense model."""
        if not self.shape.experts:
            return None
        return Routing(tokens=self.tokens, experts=self.shape.experts, active=self.shape.active_experts)

    @property
    def tokens(self) -> int:
        """Tokens that one step goes through."""
        return self.batch * self.q_len

    def check_positions(self, name: str, value: int) -> None:
        """Learned positions end somewhere."""
        have = self.shape.positions
        if have and self.kv_len > have:
            most = have - (self.kv_len - value)
            raise CaseError(
                f"{type(self).__name__}: {name}={value} must be at most {most}: {self.model} has {have} positions"
            )

    def parts(self) -> Parts:
        """Every layer's matmuls, and the head's on the last token of each sequence."""
        layer = layer_parts(
            self.shape,
            batch=self.batch,
            q_len=self.q_len,
            kv_len=self.kv_len,
            router_dtype=router_dtype(self.dtype),
        )
        return (*repeated(layer, self.shape.layers), head_part(self.shape, tokens=self.batch))

    def work(self) -> Work:
        """Weights, cached positions and token ids read once; new positions of the cache and the logits written once.

        Of the embeddings only the rows that are looked up are read, of the experts only those that a token goes to.
        """
        itemsize = dtype_of(self.dtype).itemsize
        logits = self.batch * self.shape.vocab * itemsize
        nbytes = self._weights() * itemsize + self._cache_bytes() + logits + self.tokens * INDEX_BYTES
        return work_of_parts(self.parts(), dtype=self.dtype, nbytes=nbytes, tokens=self.tokens)

    def _weights(self) -> int:
        """Parameters that are read: all but idle experts and what is not looked up; a tied head reads all rows."""
        shape = self.shape
        rows = 0 if shape.tied else shape.vocab - min(self.tokens, shape.vocab)
        places = shape.positions - self.q_len if shape.positions else 0
        idle = shape.layer_parameters() - touched_parameters(shape, self.routed)
        return shape.parameters() - (rows + places) * shape.d_model - shape.layers * idle

    def _cache_bytes(self) -> int:
        """All positions once: those from before the step are read, those of it are written."""
        return kv_cache_bytes(self.shape, batch=self.batch, length=self.kv_len, itemsize=dtype_of(self.dtype).itemsize)

    def memory_bytes(self) -> int | None:
        """Parameters, cache and activations."""
        return sum(self.memory_parts().values())

    def memory_parts(self) -> dict[str, int]:
        """Bytes by what holds them; the activations are one layer's input, and what it or the logits hold beside."""
        itemsize = dtype_of(self.dtype).itemsize
        layer = layer_activations(self.shape, batch=self.batch, seq_len=self.q_len, itemsize=itemsize, backward=False)
        stream = self.tokens * self.shape.d_model * itemsize
        logits = self.batch * self.shape.vocab * itemsize
        return {
            "parameters": self.shape.parameters() * itemsize,
            "kv_cache": self._cache_bytes(),
            "activations": stream + max(layer, logits),
        }

    @property
    def rtol(self) -> float:
        """Relative tolerance between two ways to the same logits."""
        return TOLERANCES[self.dtype]

    @property
    def atol(self) -> float:
        """Absolute tolerance: the logits' size with starting weights, and roundings that add up over the layers."""
        return TOLERANCES[self.dtype] * DEVIATION * math.sqrt(self.shape.d_model * self.shape.layers)

    def unsupported(self, target: Target) -> str | None:
        """Where the data type or the way to run it is missing."""
        return lacks_dtype(self.dtype, target) or why_not(self.execution, target)

    def launch(self) -> str | None:
        """As ``execution`` says."""
        return launch_of(self.execution)

    def describe(self) -> Description:
        """The fields, with the number of layers."""
        return {**super().describe(), "layers": self.shape.layers}

    def session(self, device: str, *, length: int) -> Session:
        """Model, an empty cache and ``length`` random tokens of each sequence."""
        from perfsuite.workloads.modules.cache import KeyValueCache
        from perfsuite.workloads.modules.transformer import Transformer, initialize

        dtype = torch_dtype(self.dtype)
        model = Transformer(self.shape, device=device, dtype=dtype).requires_grad_(False)
        initialize(model, SEED)
        cache = KeyValueCache(
            self.shape, batch=self.batch, length=self.kv_len, layers=self.shape.layers, device=device, dtype=dtype
        )
        source = random_source(device)
        return Session(
            model=model,
            cache=cache,
            tokens=_token_ids((self.batch, length), self.shape.vocab, source),
            routing=prepare(self.routed, device) if self.routed else None,
            source=source,
        )


@dataclass(frozen=True, kw_only=True)
class Session:
    """A model, its cache, and the tokens that it is given."""

    model: Transformer
    cache: KeyValueCache
    tokens: Tensor
    routing: RoutedTokens | None
    source: RandomSource

    def logits(self, model: Callable[..., Any], tokens: Tensor, *, start: int) -> Any:
        """(batch, 1, vocab): the last token's, by ``model``, which is this one or what was made of it."""
        return model(tokens, cache=self.cache, start=start, last_only=True, routing=self.routing)

    def resident_bytes(self) -> int:
        """What is there between two steps."""
        held = [*self.model.parameters(), self.cache.store, self.tokens]
        if self.routing is not None:
            held += [self.routing.chosen, *self.routing.tokens, *self.routing.pairs]
        return sum(tensor.nbytes for tensor in held)


def as_executed(model: Transformer, execution: str, device: str) -> Callable[..., Any]:
    """The model as it is, or compiled where ``execution`` says so."""
    return compiled(model, device=device) if execution == "compile" else model


def _token_ids(size: tuple[int, int], vocab: int, source: RandomSource) -> Tensor:
    import torch

    return random_integers(size, source, low=0, high=vocab, dtype=torch.int64)
