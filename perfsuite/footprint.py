"""Memory of transformers by formula: parameters, gradients, optimizer state, activations, caches. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perfsuite.errors import CaseError
from perfsuite.models import ModelShape

FP32_BYTES = 4
INDEX_BYTES = 8
"""Token ids and positions are 64-bit integers in torch."""
ATTENTIONS = ("fused", "math")
MOST = 65536


def layer_activations(
    shape: ModelShape,
    *,
    batch: int,
    seq_len: int,
    itemsize: int,
    backward: bool = True,
    checkpoint: bool = False,
    autocast: bool = False,
    attention: str = "fused",
    routed: int | None = None,
    fused_norm: bool = True,
) -> int:
    """Bytes that torch's eager autograd keeps of one layer at the end of its forward pass, the layer's input included.

    ``itemsize`` is that of the matmuls; with ``autocast`` the residual stream is fp32, and the weights' copies in
    ``itemsize`` are kept as well. With ``checkpoint`` only the input is kept. Without ``backward``: what the forward
    pass holds at its peak beside the input. ``routed`` is as in `flops.layer_parts`. ``attention`` is ``fused`` or
    ``math``, which keeps all scores. ``fused_norm=False`` is for CPUs, where RMSNorm is made of several operators and
    keeps its normalised input too. A CaseError names an attention that is not known.

    Korthikanti et al. (arXiv:2205.05198) have sbh (34 + 5 a s / h) bytes a layer in 16 bit. Their 34 has two bytes for
    dropout masks, which nothing here has; the 32 are the same tensors as here. Their 5 a s / h are the scores, which
    fused attention does not keep. Not in theirs are 4 bytes a row for each of the statistics of norms and softmax.
    """
    layer = layer_bytes(
        shape,
        batch=batch,
        seq_len=seq_len,
        itemsize=itemsize,
        autocast=autocast,
        attention=attention,
        routed=routed,
        fused_norm=fused_norm,
    )
    if not backward:
        return layer.forward_peak()
    return layer.input_bytes if checkpoint else layer.kept()


@dataclass(frozen=True, kw_only=True)
class MathAttention:
    """What torch's unfused attention holds beside its inputs, its output and their gradients, in bytes.

    ``itemsize`` is that of q, k and v; narrow ones are computed in fp32. With ``masked`` a mask is added to the scores.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    itemsize: int
    masked: bool

    @property
    def wide(self) -> int:
        """Bytes of a number that it computes with."""
        return max(self.itemsize, FP32_BYTES)

    @property
    def scores_bytes(self) -> int:
        """All scores, or their softmax."""
        return self.batch * self.heads * self.q_len * self.kv_len * self.wide

    def _query_bytes(self) -> int:
        return self.batch * self.heads * self.q_len * self.head_dim * self.wide

    def _key_bytes(self, heads: int) -> int:
        return self.batch * heads * self.kv_len * self.head_dim * self.wide

    def kept(self) -> int:
        """For the backward pass: the softmax, and q, k and v scaled, widened and repeated by head."""
        return self._query_bytes() + 2 * self._key_bytes(self.heads) + self.scores_bytes

    def forward_peak(self) -> int:
        """Scores, softmax and a byte for each, the mask; q scaled, all three widened, k and v repeated in groups."""
        widened = self._query_bytes() + 2 * self._key_bytes(self.kv_heads) if self.itemsize < self.wide else 0
        repeated = 2 * self._key_bytes(self.heads) if self.kv_heads != self.heads else 0
        scores = 2 * self.scores_bytes + self.scores_bytes // self.wide
        mask = self.q_len * self.kv_len * self.wide if self.masked else 0
        return scores + mask + self._query_bytes() + widened + repeated

    def backward_peak(self) -> int:
        """What is kept, the softmax's gradient and the scores'; or the forward pass, where the mask weighs more."""
        return max(self.kept() + 2 * self.scores_bytes, self.forward_peak())


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """One layer's tensors on a batch: ``itemsize`` of matmuls, ``residual`` of what they are added to.

    ``pairs`` are the (token, expert) pairs of a mixture.
    """

    shape: ModelShape
    batch: int
    seq_len: int
    itemsize: int
    residual: int
    autocast: bool
    fused_attention: bool
    fused_norm: bool
    pairs: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def wide(self) -> int:
        """What math attention and unfused norms compute in."""
        return max(self.itemsize, FP32_BYTES)

    @property
    def input_bytes(self) -> int:
        return self.tokens * self.shape.d_model * self.residual

    @property
    def qkv_bytes(self) -> int:
        return self.tokens * (self.shape.attention_width + 2 * self.shape.kv_width) * self.itemsize

    @property
    def turned_bytes(self) -> int:
        """Queries and keys after their rotation, in models that have one."""
        width = self.shape.attention_width + self.shape.kv_width if self.shape.gated else 0
        return self.tokens * width * self.itemsize

    @property
    def mixed_bytes(self) -> int:
        """The attention's output, before it is projected."""
        return self.tokens * self.shape.attention_width * self.itemsize

    @property
    def unfused(self) -> MathAttention:
        """The attention where nothing is fused."""
        return MathAttention(
            batch=self.batch,
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            q_len=self.seq_len,
            kv_len=self.seq_len,
            head_dim=self.shape.head_dim,
            itemsize=self.itemsize,
            masked=self.seq_len > 1,
        )

    @property
    def cast_weights_bytes(self) -> int:
        """Autocast's copies of the layer's weights; a router is computed without it."""
        experts = self.shape.experts or 1
        mlp = experts * (self.shape.mlp_up_weights + self.shape.mlp_down_weights)
        return self.itemsize * (self.shape.qkv_weights + self.shape.out_weights + mlp) if self.autocast else 0

    def kept(self) -> int:
        """What the backward pass needs."""
        mlp = self._mixture() if self.shape.experts else self._normed() + self._mlp(self.tokens)
        return 2 * self.norm() + self._normed() + self._attention() + mlp + self.cast_weights_bytes

    def norm(self) -> int:
        """Its input, and a number or two a row: mean (LayerNorm) and reciprocal deviation."""
        if self.shape.gated and not self.fused_norm:
            return self.tokens * (2 * self.shape.d_model * self.wide + FP32_BYTES)
        return self.input_bytes + self.tokens * FP32_BYTES * (1 if self.shape.gated else 2)

    def _normed(self) -> int:
        """The input of the linear layers after a norm."""
        return self.tokens * self.shape.d_model * self.itemsize

    def _attention(self) -> int:
        """Queries, keys and values, the output, and one number a row of softmax; the scores where nothing is fused.

        Values are a view of the projection's output, which is kept whole.
        """
        if self.fused_attention:
            softmax = self.tokens * self.shape.heads * FP32_BYTES
            return self.qkv_bytes + self.turned_bytes + self.mixed_bytes + softmax
        return self.unfused.kept() + self.mixed_bytes

    def _mlp(self, tokens: int) -> int:
        """Around the activation: before and after; for SwiGLU gate, up, the gate's activation and the product."""
        return tokens * (4 if self.shape.gated else 2) * self.shape.d_ff * self.itemsize

    def _mixture(self) -> int:
        """The router's fp32 input, logits and weights; each pair's input, MLP, output, weighed output and place."""
        shape = self.shape
        router = self.tokens * self.wide * (shape.d_model + shape.experts + shape.active_experts)
        ends = shape.d_model * (2 * self.itemsize + self.residual)
        return router + self._mlp(self.pairs) + self.pairs * (ends + self.residual + INDEX_BYTES)

    def head(self) -> int:
        """What final norm and output head keep, with autocast a copy of the head's weight."""
        return self.norm() + self._normed() + (self.shape.head_weights * self.itemsize if self.autocast else 0)

    @property
    def logits_bytes(self) -> int:
        """The logits in fp32."""
        return self.tokens * self.shape.vocab * FP32_BYTES

    def backward_peak(self) -> int:
        """What the backward pass needs at most beside all that is kept: that of the MLP, or of unfused attention."""
        tokens = -(-self.pairs // self.shape.experts) if self.shape.experts else self.tokens
        inner = tokens * (2 if self.shape.gated else 1) * self.shape.d_ff * self.itemsize
        return max(inner + 2 * self.input_bytes, self.attention_backward_peak() - self.kept())

    def attention_backward_peak(self) -> int:
        """All that is held in the backward pass of attention where it is not fused, when the MLP's tensors are gone.

        The values' gradient is there already, and the gradient of what the attention's output is added to.
        """
        if self.fused_attention:
            return 0
        values = self.tokens * self.shape.attention_width * self.wide
        entered = self.norm() + self._normed() + self.input_bytes
        return entered + self.unfused.backward_peak() + values + self.cast_weights_bytes

    def forward_peak(self) -> int:
        """The larger of attention and MLP without autograd: what is alive at once, the input aside."""
        cast = self._normed() if self.autocast else 0
        normed = self._normed() + (self.input_bytes if self.autocast else 0)
        scores = 0 if self.fused_attention else self.unfused.forward_peak()
        # While turning, four tensors are alive: both products, their sum, and the halves exchanged.
        turning = normed + self.qkv_bytes + 4 * self.turned_bytes
        projecting = normed + self.qkv_bytes + self.turned_bytes + max(scores, self.mixed_bytes + cast + self._normed())
        if self.shape.experts:
            most = -(-self.pairs // self.shape.experts)
            inner = 2 * self.input_bytes + most * self.shape.d_model * self.itemsize + self._mlp(most)
        else:
            inner = self._mlp(self.tokens)
        return max(turning, projecting, self.input_bytes + normed + inner) + self.cast_weights_bytes


def layer_bytes(
    shape: ModelShape,
    *,
    batch: int,
    seq_len: int,
    itemsize: int,
    autocast: bool,
    fused_norm: bool,
    attention: str = "fused",
    routed: int | None = None,
) -> LayerBytes:
    """One layer's tensors; a CaseError where the attention is not known."""
    if attention not in ATTENTIONS:
        raise CaseError(f"attention={attention!r} must be one of {', '.join(ATTENTIONS)}")
    return LayerBytes(
        shape=shape,
        batch=batch,
        seq_len=seq_len,
        itemsize=itemsize,
        residual=max(itemsize, FP32_BYTES) if autocast else itemsize,
        autocast=autocast,
        fused_attention=attention == "fused",
        fused_norm=fused_norm,
        pairs=batch * seq_len * shape.active_experts if routed is None else routed,
    )


def head_activations(
    shape: ModelShape, *, tokens: int, itemsize: int, autocast: bool = False, fused_norm: bool = True
) -> int:
    """Bytes at the peak of final norm, output head and cross entropy, which is in the loss's backward pass.

    The loss is computed in fp32: three fp32 tensors of the logits' size are alive at once, the log-softmax and the
    gradients of its output and its input.
    """
    layer = layer_bytes(shape, batch=1, seq_len=tokens, itemsize=itemsize, autocast=autocast, fused_norm=fused_norm)
    return layer.head() + 3 * layer.logits_bytes


def kv_cache_bytes(shape: ModelShape, *, batch: int, length: int, itemsize: int, layers: int | None = None) -> int:
    """Bytes of the keys and values of ``length`` positions of ``batch`` sequences, in all layers or in ``layers``."""
    return 2 * (shape.layers if layers is None else layers) * batch * length * shape.kv_width * itemsize


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a training step holds at one moment beside parameters, optimizer state and inputs."""

    gradients: int
    activations: int
    temporaries: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.gradients + self.activations + self.temporaries


def training_memory(
    shape: ModelShape,
    *,
    batch: int,
    seq_len: int,
    itemsize: int,
    autocast_itemsize: int | None = None,
    optimizer_states: int = 2,
    optimizer_temporaries: int = 0,
    accumulate: int = 1,
    checkpoint: bool = False,
    fused_norm: bool = True,
) -> dict[str, int]:
    """Bytes of a training step at its peak, by what holds them; their sum is the peak.

    ``itemsize`` is that of the parameters, which gradients and optimizer state share; ``autocast_itemsize`` that of
    the matmuls where autocast lowers it. The optimizer keeps ``optimizer_states`` tensors for each parameter, and
    holds ``optimizer_temporaries`` more during its step. ``batch`` is a micro-batch of ``accumulate``.

    Gradients come while activations go, so the peak is not the sum of both at their largest: it is found among the end
    of the forward pass, the loss, the head, the first and the last layer's backward pass, the embedding and the
    optimizer's step. Of eager execution; a compiled step holds less.
    """
    parameters = shape.parameters() * itemsize
    layer = layer_bytes(
        shape,
        batch=batch,
        seq_len=seq_len,
        itemsize=autocast_itemsize or itemsize,
        autocast=autocast_itemsize is not None,
        fused_norm=fused_norm,
    )
    step = Moment(gradients=parameters, activations=0, temporaries=optimizer_temporaries * parameters)
    passes = training_moments(layer, itemsize=itemsize, accumulate=accumulate, checkpoint=checkpoint)
    peak = max(*passes, step, key=lambda moment: moment.total)
    routing = 2 * batch * seq_len * shape.active_experts
    return {
        "parameters": parameters,
        "gradients": peak.gradients,
        "optimizer_state": optimizer_states * parameters,
        "activations": peak.activations,
        "temporaries": peak.temporaries,
        "inputs": (batch * (seq_len + 1) + routing) * INDEX_BYTES,
    }


def training_moments(layer: LayerBytes, *, itemsize: int, accumulate: int, checkpoint: bool) -> list[Moment]:
    """Where in the forward and backward pass the peak may be; all gradients of earlier micro-batches are there."""
    shape = layer.shape
    full, table = shape.parameters() * itemsize, shape.head_weights * itemsize
    held = full if accumulate > 1 else 0
    kept = layer.input_bytes if checkpoint else layer.kept()
    again = layer.kept() - kept
    layers, head, logits = shape.layers * kept, layer.head(), layer.logits_bytes
    narrow = layer.tokens * shape.vocab * layer.itemsize if layer.itemsize < FP32_BYTES else 0
    # Autocast's copies of weights live until the forward pass is over, checkpointed or not.
    copies = shape.layers * layer.cast_weights_bytes if checkpoint else 0
    cast_table = shape.head_weights * layer.itemsize if layer.autocast else 0
    # A tied head's gradient waits for the embedding's, and their sum is a third tensor of that size.
    waiting = table if shape.tied or not held else 0
    to_come = (shape.layer_parameters() + shape.positions * shape.d_model) * itemsize + (0 if shape.tied else table)
    return [
        Moment(gradients=held, activations=layers + copies + head + 2 * logits + narrow),
        Moment(gradients=held, activations=layers + head + 3 * logits),
        Moment(gradients=held + table, activations=layers + head + logits + narrow + cast_table),
        Moment(gradients=held + waiting, activations=layers + again + layer.backward_peak()),
        Moment(
            gradients=held + table * shape.tied if held else full - to_come,
            activations=layer.kept() + layer.backward_peak(),
        ),
        Moment(
            gradients=full + table * (2 * shape.tied + (accumulate > 1)),
            activations=2 * layer.input_bytes,
        ),
    ]


def largest_batch(needed: Callable[[int], int | None], free_bytes: int, most: int = MOST) -> int | None:
    """The largest batch up to ``most`` whose memory fits into ``free_bytes``; None where not even 1 does.

    ``needed`` is the memory of a batch in bytes and grows with it; where it is None, nothing is known, nor returned.
    """

    def fits(batch: int) -> bool:
        needed_bytes = needed(batch)
        return needed_bytes is not None and needed_bytes <= free_bytes

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low or None
