"""The layers of decoder-only transformers: attention, MLPs, mixtures of experts, and the block of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from perfsuite.errors import CaseError
from perfsuite.models import ModelShape
from perfsuite.workloads.modules.cache import LayerCache
from perfsuite.workloads.routing import RoutedTokens

NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The cosines and sines by which rotary positions turn queries and keys, (q_len, head_dim) each."""

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """``x``, (batch, heads, q_len, head_dim), turned; its halves are the planes' two axes, as in Llama.

        The data type stays that of ``x``, which under autocast is not that of the residual stream.
        """
        first, second = x.chunk(2, dim=-1)
        across = torch.cat((-second, first), dim=-1)
        return x * self.cos.to(x.dtype) + across * self.sin.to(x.dtype)


def rotation_for(shape: ModelShape, *, positions: range, device: torch.device | str, dtype: torch.dtype) -> Rotation:
    """The rotation of tokens at consecutive ``positions`` (arXiv:2104.09864), computed in fp32."""
    planes = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32)
    frequencies = shape.rope_theta ** (-planes / shape.head_dim)
    places = torch.arange(positions.start, positions.stop, device=device, dtype=torch.float32)
    angles = (places[:, None] * frequencies).repeat(1, 2)
    return Rotation(cos=angles.cos().to(dtype), sin=angles.sin().to(dtype))


def norm_for(shape: ModelShape, *, device: str, dtype: torch.dtype) -> nn.Module:
    """RMSNorm for models of Llama's kind, LayerNorm for those of GPT's."""
    if shape.gated:
        return nn.RMSNorm(shape.d_model, eps=NORM_EPSILON, device=device, dtype=dtype)
    return nn.LayerNorm(shape.d_model, eps=NORM_EPSILON, bias=shape.bias, device=device, dtype=dtype)


class Attention(nn.Module):
    """Causal self-attention; query heads may share the heads of keys and values.

    The caller chooses the kernel with `torch.nn.attention.sdpa_kernel`.
    """

    def __init__(self, shape: ModelShape, *, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        width = shape.attention_width
        self.qkv = nn.Linear(shape.d_model, width + 2 * shape.kv_width, bias=shape.bias, device=device, dtype=dtype)
        self.out = nn.Linear(width, shape.d_model, bias=shape.bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, *, rotation: Rotation | None = None, cache: LayerCache | None = None) -> Tensor:
        """(batch, q_len, d_model) to the same; with a cache, after the positions that it holds."""
        shape = self.shape
        heads = self.qkv(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        turned, values = heads.split((shape.heads + shape.kv_heads, shape.kv_heads), dim=1)
        if rotation is not None:
            turned = rotation.turn(turned)
        queries, keys = turned.split((shape.heads, shape.kv_heads), dim=1)
        if cache is not None:
            keys, values = cache.update(keys, values)
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            is_causal=_is_causal(queries.shape[-2], keys.shape[-2]),
            enable_gqa=shape.heads != shape.kv_heads,
        )
        return self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return] # a module's call is untyped


def _is_causal(q_len: int, kv_len: int) -> bool:
    """Whether the mask is needed: a single query is the last position and sees all; else a CaseError unless square.

    torch aligns the causal mask of fewer queries than keys to the first key, not to the last.
    """
    if q_len == 1:
        return False
    if q_len != kv_len:
        raise CaseError(
            f"attention: q_len={q_len} after {kv_len - q_len} cached positions is neither prefill nor decoding; "
            "start at position 0, or give one token at a time"
        )
    return True


class Mlp(nn.Module):
    """GPT's MLP: two linear maps around GELU in its tanh form."""

    def __init__(self, shape: ModelShape, *, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(shape.d_model, shape.d_ff, bias=shape.bias, device=device, dtype=dtype)
        self.down = nn.Linear(shape.d_ff, shape.d_model, bias=shape.bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) to the same."""
        return self.down(functional.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return] # as above


class GatedMlp(nn.Module):
    """Llama's MLP, SwiGLU (arXiv:2002.05202); the gate and the way up are one linear map, the gate first."""

    def __init__(self, shape: ModelShape, *, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(shape.d_model, 2 * shape.d_ff, bias=shape.bias, device=device, dtype=dtype)
        self.down = nn.Linear(shape.d_ff, shape.d_model, bias=shape.bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) to the same."""
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)  # type: ignore[no-any-return] # as above


class Mixture(nn.Module):
    """A mixture of expert MLPs: each token goes to those of the highest logits, weighed by their softmax.

    The weights are Mixtral's (arXiv:2401.04088): the softmax is over the chosen experts alone.
    """

    def __init__(self, shape: ModelShape, *, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.active = shape.active_experts
        self.router = nn.Linear(shape.d_model, shape.experts, bias=False, device=device, dtype=dtype)
        self.experts = nn.ModuleList(mlp_for(shape, device=device, dtype=dtype) for _ in range(shape.experts))

    def forward(self, x: Tensor, *, routing: RoutedTokens | None = None) -> Tensor:
        """(batch, q_len, d_model) to the same; ``routing`` takes the choice away from the router, not the weights.

        A pair that the routing drops adds nothing. A CaseError says that the routing is of other tokens.
        """
        rows = x.flatten(0, -2)
        logits = self._logits(rows)
        routing = self._choose(logits) if routing is None else _checked(routing, len(rows))
        weights = logits.gather(-1, routing.chosen).softmax(dim=-1).to(x.dtype).flatten()
        mixed = torch.zeros_like(rows)
        for expert, tokens, pairs in zip(self.experts, routing.tokens, routing.pairs, strict=True):
            weighed = expert(rows.index_select(0, tokens)) * weights.index_select(0, pairs).unsqueeze(-1)
            mixed.index_add_(0, tokens, weighed.to(x.dtype))
        return mixed.view_as(x)

    def _logits(self, rows: Tensor) -> Tensor:
        """In fp32 whatever autocast says: a rounded logit sends a token to another expert."""
        # On meta there is no autocast to switch off.
        with nullcontext() if rows.is_meta else torch.autocast(rows.device.type, enabled=False):
            return functional.linear(rows.float(), self.router.weight.float())

    def _choose(self, logits: Tensor) -> RoutedTokens:
        """The router's own choice; finding each expert's tokens waits for the device."""
        chosen = logits.topk(self.active, dim=-1).indices
        found = [torch.where(chosen == expert) for expert in range(len(self.experts))]
        return RoutedTokens(
            chosen=chosen,
            tokens=tuple(tokens for tokens, _ in found),
            pairs=tuple(tokens * self.active + slots for tokens, slots in found),
        )


def _checked(routing: RoutedTokens, tokens: int) -> RoutedTokens:
    """The routing, or a CaseError where it is not of this many tokens."""
    if len(routing.chosen) != tokens:
        raise CaseError(f"routing: tokens={len(routing.chosen)} must be the {tokens} tokens of the input")
    return routing


def mlp_for(shape: ModelShape, *, device: str, dtype: torch.dtype) -> Mlp | GatedMlp:
    """The MLP of the model's kind: a dense layer's, or one expert's."""
    kind = GatedMlp if shape.gated else Mlp
    return kind(shape, device=device, dtype=dtype)


class Block(nn.Module):
    """One layer: attention, then an MLP or a mixture, each on the normed input and added to it."""

    def __init__(self, shape: ModelShape, *, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = norm_for(shape, device=device, dtype=dtype)
        self.attention = Attention(shape, device=device, dtype=dtype)
        self.mlp_norm = norm_for(shape, device=device, dtype=dtype)
        kind = Mixture if shape.experts else mlp_for
        self.mlp: Mixture | Mlp | GatedMlp = kind(shape, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        *,
        rotation: Rotation | None = None,
        cache: LayerCache | None = None,
        routing: RoutedTokens | None = None,
    ) -> Tensor:
        """(batch, q_len, d_model) to the same."""
        x = x + self.attention(self.attention_norm(x), rotation=rotation, cache=cache)
        normed = self.mlp_norm(x)
        mixed: Tensor = self.mlp(normed, routing=routing) if isinstance(self.mlp, Mixture) else self.mlp(normed)
        return x + mixed
