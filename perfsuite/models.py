"""Decoder-only transformers by their sizes, and those of published models: pure arithmetic on shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from perfsuite.errors import CaseError

MAY_BE_ZERO = ("positions", "context", "experts", "active_experts")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer by its sizes; ``experts`` is 0 for a dense model.

    ``gated`` models are of Llama's kind (RMSNorm, rotary positions, SwiGLU with three matrices), others of GPT's
    (LayerNorm, learned positions, GELU between two matrices). ``bias`` covers every linear layer and norm. ``tied``
    models use one matrix as input embedding and output head. ``positions`` counts learned position embeddings.
    ``context`` is how many tokens a sequence has where nobody says otherwise: those that the published model was
    trained on; 0 where there is no such number.
    A CaseError names a size that cannot be.
    """

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    gated: bool = True
    bias: bool = False
    tied: bool = False
    positions: int = 0
    context: int = 0
    experts: int = 0
    active_experts: int = 0
    rope_theta: float = 10000.0
    """The base of the rotary positions' wavelengths."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int":
                _check_size(field.name, getattr(self, field.name))
        theta: object = self.rope_theta
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
            raise CaseError(f"model: rope_theta={theta!r} must be a finite number above 0")
        if self.gated and self.head_dim % 2:
            raise CaseError(f"model: head_dim={self.head_dim} must be even: rotary positions turn pairs")
        if self.gated and self.positions:
            raise CaseError(f"model: positions={self.positions} goes with gated=False; others have rotary positions")
        if self.heads % self.kv_heads:
            raise CaseError(f"model: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.bias and (self.gated or self.experts):
            raise CaseError("model: bias=True goes with gated=False and experts=0 alone; others have no biases here")
        if bool(self.experts) != bool(self.active_experts) or self.active_experts > self.experts:
            raise CaseError(
                f"model: active_experts={self.active_experts} must lie between 1 and experts={self.experts}, "
                "and both be 0 for a dense model"
            )

    @property
    def attention_width(self) -> int:
        """H x Q: what all query heads are wide together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """What all heads of the keys are wide together; those of the values as well."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_weights(self) -> int:
        """Weights of one layer's projections to queries, keys and values."""
        return self.d_model * (self.attention_width + 2 * self.kv_width)

    @property
    def out_weights(self) -> int:
        """Weights of one layer's projection of the attention's output."""
        return self.d_model * self.attention_width

    @property
    def mlp_up_weights(self) -> int:
        """Weights from the model's width to the MLP's, of one MLP or one expert: gate and up, or one matrix."""
        return (2 if self.gated else 1) * self.d_model * self.d_ff

    @property
    def mlp_down_weights(self) -> int:
        """Weights from the MLP's width back, of one MLP or one expert."""
        return self.d_model * self.d_ff

    @property
    def router_weights(self) -> int:
        """Weights of one layer's router; 0 in a dense model."""
        return self.d_model * self.experts

    @property
    def head_weights(self) -> int:
        """Weights of the output head, tied or not."""
        return self.d_model * self.vocab

    @property
    def _mlp(self) -> int:
        return self.mlp_up_weights + self.mlp_down_weights

    def matmul_weights(self, *, vocab: int | None = None) -> int:
        """Weights that a token is multiplied with: active experts, router and output head, no look-ups."""
        mlp = (self.active_experts or 1) * self._mlp + self.router_weights
        return self.layers * (self.qkv_weights + self.out_weights + mlp) + self.d_model * (vocab or self.vocab)

    def layer_parameters(self, *, active: bool = False) -> int:
        """Parameters of one layer with its two norms: all of them, or those that one token uses."""
        count = (self.active_experts if active else self.experts) or 1
        norms = 2 * self.d_model * (2 if self.bias else 1)
        return self.qkv_weights + self.out_weights + count * self._mlp + self.router_weights + norms + self._biases

    def parameters(self, *, active: bool = False) -> int:
        """All parameters, or those that one token uses where only some experts are active."""
        tables = self.d_model * (self.vocab * (1 if self.tied else 2) + self.positions)
        final_norm = self.d_model * (2 if self.bias else 1)
        return self.layers * self.layer_parameters(active=active) + final_norm + tables

    @property
    def _biases(self) -> int:
        """Biases of one layer's linear maps."""
        if not self.bias:
            return 0
        return (
            self.attention_width
            + 2 * self.kv_width
            + self.d_model
            + (2 if self.gated else 1) * self.d_ff
            + self.d_model
        )


def _check_size(name: str, value: object) -> None:
    """Nothing where ``value`` is a whole number that the size ``name`` may have, or a CaseError."""
    least = 0 if name in MAY_BE_ZERO else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CaseError(f"model: {name}={value!r} must be a whole number of at least {least}")


def model_shape(name: str, *, layers: int | None = None) -> ModelShape:
    """The preset called ``name``, with another number of layers where that is given; a CaseError lists the presets."""
    known, given = f"use one of {', '.join(MODELS)}", type(name)
    if not issubclass(given, str):
        raise CaseError(f"model must be a preset's name, not of type {given.__name__}; {known}")
    if name not in MODELS:
        raise CaseError(f"model={name!r} is not known; {known}")
    return MODELS[name] if layers is None else replace(MODELS[name], layers=layers)


MODELS = {
    # Radford et al. 2019 and the released checkpoint: 124,439,808 parameters.
    "gpt2-124m": ModelShape(
        layers=12,
        d_model=768,
        heads=12,
        kv_heads=12,
        head_dim=64,
        d_ff=3072,
        vocab=50257,
        gated=False,
        bias=True,
        tied=True,
        positions=1024,
        context=1024,
    ),
    # Brown et al. 2020 (arXiv:2005.14165), table 2.1.
    "gpt3-175b": ModelShape(
        layers=96,
        d_model=12288,
        heads=96,
        kv_heads=96,
        head_dim=128,
        d_ff=49152,
        vocab=50257,
        gated=False,
        bias=True,
        tied=True,
        positions=2048,
        context=2048,
    ),
    # Touvron et al. 2023 (arXiv:2307.09288); 6,738,415,616 parameters.
    "llama2-7b": ModelShape(
        layers=32, d_model=4096, heads=32, kv_heads=32, head_dim=128, d_ff=11008, vocab=32000, context=4096
    ),
    # Grattafiori et al. 2024 (arXiv:2407.21783), table 3; 8,030,261,248 and 70,553,706,496 parameters.
    "llama3-8b": ModelShape(
        layers=32,
        d_model=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        d_ff=14336,
        vocab=128256,
        rope_theta=5e5,
        context=8192,
    ),
    "llama3-70b": ModelShape(
        layers=80,
        d_model=8192,
        heads=64,
        kv_heads=8,
        head_dim=128,
        d_ff=28672,
        vocab=128256,
        rope_theta=5e5,
        context=8192,
    ),
    # Jiang et al. 2024 (arXiv:2401.04088), table 1; 46,702,792,704 parameters.
    "mixtral-8x7b": ModelShape(
        layers=32,
        d_model=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        d_ff=14336,
        vocab=32000,
        context=32768,
        experts=8,
        active_experts=2,
        rope_theta=1e6,
    ),
    # Of no publication: small enough for a step to take milliseconds on one CPU core.
    "tiny-gpt": ModelShape(
        layers=2,
        d_model=128,
        heads=4,
        kv_heads=4,
        head_dim=32,
        d_ff=512,
        vocab=512,
        gated=False,
        bias=True,
        tied=True,
        positions=256,
        context=256,
    ),
    "tiny-llama": ModelShape(layers=2, d_model=128, heads=4, kv_heads=2, head_dim=32, d_ff=384, vocab=512, context=256),
    "tiny-moe": ModelShape(
        layers=2,
        d_model=128,
        heads=4,
        kv_heads=2,
        head_dim=32,
        d_ff=256,
        vocab=512,
        context=256,
        experts=4,
        active_experts=2,
    ),
}
