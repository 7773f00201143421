"""FLOPs by formula and by convention: pure arithmetic on shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from perfsuite.errors import CaseError
from perfsuite.models import ModelShape

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
class FlopPart:
    """FLOPs of one component of a step, by the convention `exact`.

    ``recompute`` is what of the forward pass is done a second time; it counts for HFU alone. ``dtype`` is the data
    type of the matmuls where it is not the workload's own. ``unmasked`` is the forward pass with no mask looked at,
    where a mask keeps only a part: torch's flop counter counts that.
    """

    name: str
    forward: int
    backward: int = 0
    recompute: int = 0
    dtype: str | None = None
    unmasked: int | None = None

    @property
    def model(self) -> int:
        """What MFU counts."""
        return self.forward + self.backward

    @property
    def counted(self) -> int:
        """What torch's flop counter says on meta tensors: every pass, masks not looked at."""
        passes = self.forward + self.backward + self.recompute
        return passes if self.unmasked is None else passes * self.unmasked // self.forward


Parts = tuple[FlopPart, ...]


def model_flops(parts: Iterable[FlopPart]) -> int:
    """What MFU counts: forward and backward, nothing for what is recomputed."""
    return sum(part.model for part in parts)


def hardware_flops(parts: Iterable[FlopPart]) -> int:
    """What HFU counts: recomputed FLOPs as well."""
    return sum(part.model + part.recompute for part in parts)


def flops_by_dtype(parts: Iterable[FlopPart], *, dtype: str) -> tuple[tuple[str, int], ...]:
    """MFU's FLOPs of each data type, ``dtype`` where a part has none of its own; in the order of first use."""
    found: dict[str, int] = {}
    for part in parts:
        key = part.dtype or dtype
        found[key] = found.get(key, 0) + part.model
    return tuple((key, flops) for key, flops in found.items() if flops)


def linear_part(name: str, *, tokens: int, weights: int, dtype: str | None = None) -> FlopPart:
    """A linear layer's forward pass: each token with each weight, a multiplication and an addition."""
    return FlopPart(name=name, forward=2 * tokens * weights, dtype=dtype)


def attention_part(*, batch: int, heads: int, q_len: int, kv_len: int, head_dim: int, causal: bool) -> FlopPart:
    """Attention's two matmuls, forward."""
    forward, full = (
        attention_flops(batch=batch, heads=heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim, causal=masked)
        for masked in (causal, False)
    )
    return FlopPart(name="attention", forward=forward, unmasked=full)


def layer_parts(
    shape: ModelShape,
    *,
    batch: int,
    q_len: int,
    kv_len: int | None = None,
    routed: int | None = None,
    router_dtype: str | None = None,
) -> Parts:
    """The forward pass of one layer on ``batch`` sequences of ``q_len`` tokens, the last of ``kv_len`` positions.

    ``routed`` is how many (token, expert) pairs are computed in all; left out, every token's active experts are.
    """
    tokens = batch * q_len
    attention = attention_part(
        batch=batch,
        heads=shape.heads,
        q_len=q_len,
        kv_len=q_len if kv_len is None else kv_len,
        head_dim=shape.head_dim,
        causal=True,
    )
    pairs = tokens * (shape.active_experts or 1) if routed is None else routed
    router = (linear_part("router", tokens=tokens, weights=shape.router_weights, dtype=router_dtype),)
    return (
        linear_part("qkv", tokens=tokens, weights=shape.qkv_weights),
        attention,
        linear_part("attention_out", tokens=tokens, weights=shape.out_weights),
        *(router if shape.experts else ()),
        linear_part("mlp_up", tokens=pairs, weights=shape.mlp_up_weights),
        linear_part("mlp_down", tokens=pairs, weights=shape.mlp_down_weights),
    )


def head_part(shape: ModelShape, *, tokens: int) -> FlopPart:
    """The output head's forward pass on ``tokens`` tokens, tied or not."""
    return linear_part("head", tokens=tokens, weights=shape.head_weights)


def trained(parts: Iterable[FlopPart]) -> Parts:
    """Forward parts with their backward passes: two matmuls for each of the forward's."""
    return tuple(replace(part, backward=BACKWARD * part.forward) for part in parts)


def checkpointed(parts: Iterable[FlopPart]) -> Parts:
    """A layer's parts whose activations are recomputed in the backward pass.

    torch stops recomputing once it has what the backward pass needs; a dense layer ends in a matmul whose own output
    nothing needs, so that one is not done again. A mixture weighs its experts' outputs, and needs them.
    """
    parts = tuple(parts)
    dense = all(part.name != "router" for part in parts)
    return tuple(replace(part, recompute=0 if dense and part.name == "mlp_down" else part.forward) for part in parts)


def repeated(parts: Iterable[FlopPart], times: int) -> Parts:
    """The parts of ``times`` equal layers or micro-batches."""
    return tuple(
        replace(
            part,
            forward=times * part.forward,
            backward=times * part.backward,
            recompute=times * part.recompute,
            unmasked=None if part.unmasked is None else times * part.unmasked,
        )
        for part in parts
    )


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
MFU_CONVENTIONS = ("palm", "torchtitan", "megatron")
"""Other people's counts for an MFU; ``exact`` is our own, which they stand beside, and ``hfu`` is of no MFU."""


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
