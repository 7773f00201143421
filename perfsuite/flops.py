"""FLOPs by formula and by convention: pure arithmetic on shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perfsuite.errors import CaseError

BACKWARD = 2
"""A matmul's backward pass has two of the forward's size: one for each of its inputs."""
TRAINING = 1 + BACKWARD


def matmul_flops(*, m: int, n: int, k: int, batch: int = 1) -> int:
    """FLOPs of ``batch`` products of (m, k) and (k, n) matrices: a multiplication and an addition each."""
    return 2 * batch * m * n * k


def attention_pairs(*, q_len: int, kv_len: int, causal: bool) -> int:
    """How many (query, key) pairs a head looks at; the last query of a causal mask sees every key."""
    if not causal:
        return q_len * kv_len
    if q_len > kv_len:
        raise CaseError(f"attention: q_len={q_len} must not exceed kv_len={kv_len} with a causal mask")
    return q_len * (kv_len - q_len) + q_len * (q_len + 1) // 2


def attention_flops(
    *, batch: int, heads: int, q_len: int, kv_len: int, head_dim: int, causal: bool, value_dim: int | None = None
) -> int:
    """Forward FLOPs of attention's two matmuls, over just the pairs that the mask keeps.

    ``heads`` are the query heads; sharing keys and values between heads changes bytes, not FLOPs.
    """
    pairs = attention_pairs(q_len=q_len, kv_len=kv_len, causal=causal)
    return 2 * batch * heads * pairs * (head_dim + (head_dim if value_dim is None else value_dim))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer by its sizes; ``experts`` is 0 for a dense model.

    ``gated`` MLPs (SwiGLU) have three matrices, others two. ``bias`` covers every linear layer and norm. ``tied``
    models use one matrix as input embedding and output head. ``positions`` counts learned position embeddings.
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
    experts: int = 0
    active_experts: int = 0

    @property
    def attention_width(self) -> int:
        """H x Q: what all query heads are wide together."""
        return self.heads * self.head_dim

    @property
    def _projections(self) -> int:
        """Weights of q, k, v and the output projection of one layer."""
        return self.d_model * (2 * self.attention_width + 2 * self.kv_heads * self.head_dim)

    @property
    def _mlp(self) -> int:
        """Weights of one MLP or one expert."""
        return (3 if self.gated else 2) * self.d_model * self.d_ff

    def matmul_weights(self, *, vocab: int | None = None) -> int:
        """Weights that a token is multiplied with: active experts, router and output head, no look-ups."""
        mlp = self._mlp * self.active_experts + self.d_model * self.experts if self.experts else self._mlp
        return self.layers * (self._projections + mlp) + self.d_model * (vocab or self.vocab)

    def parameters(self, *, active: bool = False) -> int:
        """All parameters, or those that one token uses where only some experts are active."""
        count = (self.active_experts if active else self.experts) or 1
        mlp = count * self._mlp + self.d_model * self.experts
        norms = (2 * self.layers + 1) * self.d_model * (2 if self.bias else 1)
        tables = self.d_model * (self.vocab * (1 if self.tied else 2) + self.positions)
        return self.layers * (self._projections + mlp + self._biases) + norms + tables

    @property
    def _biases(self) -> int:
        """Biases of one layer's linear maps."""
        if not self.bias:
            return 0
        qkv = self.attention_width + 2 * self.kv_heads * self.head_dim
        return qkv + self.d_model + (2 if self.gated else 1) * self.d_ff + self.d_model


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
    ),
    # Touvron et al. 2023 (arXiv:2307.09288); 6,738,415,616 parameters.
    "llama2-7b": ModelShape(layers=32, d_model=4096, heads=32, kv_heads=32, head_dim=128, d_ff=11008, vocab=32000),
    # Grattafiori et al. 2024 (arXiv:2407.21783), table 3; 8,030,261,248 and 70,553,706,496 parameters.
    "llama3-8b": ModelShape(layers=32, d_model=4096, heads=32, kv_heads=8, head_dim=128, d_ff=14336, vocab=128256),
    "llama3-70b": ModelShape(layers=80, d_model=8192, heads=64, kv_heads=8, head_dim=128, d_ff=28672, vocab=128256),
    # Jiang et al. 2024 (arXiv:2401.04088), table 1; 46,702,792,704 parameters.
    "mixtral-8x7b": ModelShape(
        layers=32,
        d_model=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        d_ff=14336,
        vocab=32000,
        experts=8,
        active_experts=2,
    ),
}


def params_flops_per_token(params: int) -> int:
    """6N: forward and backward FLOPs of one token where nothing but the number of parameters is known."""
    return 2 * TRAINING * params


def _attention_per_token(shape: ModelShape, seq_len: int) -> int:
    """12 L H Q T: forward and backward, every query with every key."""
    return 4 * TRAINING * shape.layers * shape.attention_width * seq_len


def exact(shape: ModelShape, seq_len: int) -> int:
    """Matmuls, and attention over the T(T+1)/2 pairs that a causal mask keeps: 6 L H Q (T+1) a token."""
    pairs = 2 * TRAINING * shape.layers * shape.attention_width * (seq_len + 1)
    return 2 * TRAINING * shape.matmul_weights() + pairs


def palm(shape: ModelShape, seq_len: int) -> int:
    """6N + 12 L H Q T: all parameters, attention in full (arXiv:2204.02311, appendix B)."""
    return params_flops_per_token(shape.parameters()) + _attention_per_token(shape, seq_len)


def torchtitan(shape: ModelShape, seq_len: int) -> int:
    """As palm, without the embedding unless it is tied, and with active experts only."""
    table = 0 if shape.tied else shape.vocab * shape.d_model
    return params_flops_per_token(shape.parameters(active=True) - table) + _attention_per_token(shape, seq_len)


def megatron(shape: ModelShape, seq_len: int) -> int:
    """6 x the weights of every matmul + 6 L H Q T: causal attention halved, vocabulary padded to 128."""
    padded = -(-shape.vocab // 128) * 128
    weights = shape.matmul_weights(vocab=padded)
    return 2 * TRAINING * weights + _attention_per_token(shape, seq_len) // 2


def hfu(shape: ModelShape, seq_len: int) -> int:
    """palm's count with every forward pass done twice: all activations recomputed, 4 forwards' worth instead of 3."""
    return palm(shape, seq_len) * (TRAINING + 1) // TRAINING


TRAINING_CONVENTIONS: dict[str, Callable[[ModelShape, int], int]] = {
    "exact": exact,
    "palm": palm,
    "torchtitan": torchtitan,
    "megatron": megatron,
    "hfu": hfu,
}


def training_flops_per_token(shape: ModelShape, *, seq_len: int, convention: str = "exact") -> int:
    """Forward and backward FLOPs of one token of a sequence of ``seq_len``, by one convention.

    Gradient accumulation multiplies the tokens, not this; recomputation is counted by ``hfu`` alone.
    """
    try:
        formula = TRAINING_CONVENTIONS[convention]
    except KeyError:
        known = ", ".join(TRAINING_CONVENTIONS)
        raise CaseError(f"FLOP convention {convention!r} is not known; use one of {known}") from None
    return formula(shape, seq_len)
