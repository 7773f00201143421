"""The layers against layers that others wrote, and against formulas written out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from perfsuite.errors import CaseError
from perfsuite.models import ModelShape, model_shape
from perfsuite.workloads.modules.layers import Mixture
from perfsuite.workloads.routing import Routing, prepare
from tests.module_support import (
    BATCH,
    Q_LEN,
    ROUTING,
    TINY,
    assert_alike,
    gradients,
    numbers,
    one_thread,
    rotation,
    some_inputs,
    stir,
    stirred_block,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


# GPT's kind: the names in torch's own layer.
TORCH_NAMES = {
    "attention_norm": "norm1",
    "attention.qkv.": "self_attn.in_proj_",
    "attention.out": "self_attn.out_proj",
    "mlp_norm": "norm2",
    "mlp.up": "linear1",
    "mlp.down": "linear2",
}


def renamed(parameters: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The parameters under another module's names."""
    found = {}
    for name, tensor in parameters.items():
        ours = next(start for start in names if name.startswith(start))
        found[name.replace(ours, names[ours])] = tensor
    return found


def test_gpt_block_is_torchs_encoder_layer_with_a_causal_mask() -> None:
    shape, block = model_shape("tiny-gpt"), stirred_block("tiny-gpt")
    layer = nn.TransformerEncoderLayer(
        shape.d_model,
        shape.heads,
        shape.d_ff,
        dropout=0.0,
        activation=partial(functional.gelu, approximate="tanh"),
        batch_first=True,
        norm_first=True,
    )
    layer.load_state_dict(renamed(block.state_dict(), TORCH_NAMES))
    x = some_inputs(shape)
    mask = nn.Transformer.generate_square_subsequent_mask(Q_LEN)
    theirs = renamed(dict(block.named_parameters()), TORCH_NAMES).keys()
    assert_alike(
        gradients(block(x), [x, *block.parameters()]),
        gradients(layer(x, src_mask=mask), [x, *(layer.get_parameter(name) for name in theirs)]),
    )


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * gain


def turned(x: Tensor, theta: float) -> Tensor:
    """(batch, q_len, heads, head_dim): each pair (i, i + head_dim / 2) is a complex number, turned by its angle."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[1]), theta ** (-torch.arange(half) / half))
    plane = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((plane.real, plane.imag), dim=-1)


def attended(shape: ModelShape, x: Tensor, qkv: Tensor) -> Tensor:
    """Attention by its formula, every query head with the keys and values of its group."""
    mapped = (x @ qkv.T).view(*x.shape[:2], -1, shape.head_dim)
    queries, keys, values = torch.split(mapped, [shape.heads, shape.kv_heads, shape.kv_heads], dim=2)
    group = [head * shape.kv_heads // shape.heads for head in range(shape.heads)]
    queries, keys = turned(queries, shape.rope_theta), turned(keys, shape.rope_theta)[:, :, group]
    scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys) / shape.head_dim**0.5
    future = torch.ones(Q_LEN, Q_LEN, dtype=torch.bool).triu(diagonal=1)
    shares = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", shares, values[:, :, group]).flatten(2)


def swiglu(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = up.chunk(2)
    gated = x @ gate.T
    return (gated * torch.sigmoid(gated) * (x @ value.T)) @ down.T


def mixed_densely(shape: ModelShape, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Every expert on every token, weighed by the softmax of the highest logits; the others weigh nothing."""
    logits = x @ weights["mlp.router.weight"].T
    least = logits.topk(shape.active_experts).values[..., -1:]
    shares = logits.masked_fill(logits < least, -torch.inf).softmax(dim=-1)
    experts = [
        swiglu(x, weights[f"mlp.experts.{expert}.up.weight"], weights[f"mlp.experts.{expert}.down.weight"])
        for expert in range(shape.experts)
    ]
    return (torch.stack(experts, dim=-1) * shares[..., None, :]).sum(dim=-1)


def llama_block(shape: ModelShape, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """A layer of Llama's kind, or of Mixtral's, by formulas."""
    attention = attended(shape, rms_norm(x, weights["attention_norm.weight"]), weights["attention.qkv.weight"])
    x = x + attention @ weights["attention.out.weight"].T
    normed = rms_norm(x, weights["mlp_norm.weight"])
    if shape.experts:
        return x + mixed_densely(shape, normed, weights)
    return x + swiglu(normed, weights["mlp.up.weight"], weights["mlp.down.weight"])


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-moe"])
def test_llama_block_is_its_formulas(name: str) -> None:
    shape, block = model_shape(name), stirred_block(name)
    weights = dict(block.named_parameters())
    x = some_inputs(shape)
    assert_alike(
        gradients(block(x, rotation=rotation(shape)), [x, *weights.values()]),
        gradients(llama_block(shape, x, weights), [x, *weights.values()]),
    )


def first(out: Any) -> Tensor:
    """A Hugging Face layer's hidden states; older versions return them in a tuple."""
    states: Tensor = out[0] if isinstance(out, tuple) else out
    return states


def test_llama_block_is_hugging_faces() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    shape, block = model_shape("tiny-llama"), stirred_block("tiny-llama")
    config = llama.LlamaConfig(
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
    )
    layer = llama.LlamaDecoderLayer(config, 0)
    state = block.state_dict()
    widths = (shape.attention_width, shape.kv_width, shape.kv_width)
    projections = dict(zip("qkv", state["attention.qkv.weight"].split(widths), strict=True))
    gate, up = state["mlp.up.weight"].chunk(2)
    layer.load_state_dict(
        {
            "input_layernorm.weight": state["attention_norm.weight"],
            **{f"self_attn.{name}_proj.weight": weight for name, weight in projections.items()},
            "self_attn.o_proj.weight": state["attention.out.weight"],
            "post_attention_layernorm.weight": state["mlp_norm.weight"],
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": state["mlp.down.weight"],
        }
    )
    x = some_inputs(shape)
    turns = llama.LlamaRotaryEmbedding(config)(x, torch.arange(Q_LEN)[None])
    assert_alike(
        gradients(block(x, rotation=rotation(shape)), [x]),
        gradients(first(layer(x, position_embeddings=turns)), [x]),
    )


HUGGING_FACE_NAMES = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def test_gpt_block_is_hugging_faces() -> None:
    gpt2 = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    shape, block = model_shape("tiny-gpt"), stirred_block("tiny-gpt")
    config = gpt2.GPT2Config(
        n_embd=shape.d_model, n_head=shape.heads, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="sdpa"
    )
    layer = gpt2.GPT2Block(config, 0)
    # Its weights are (in, out).
    state = {name: tensor.T if tensor.ndim > 1 else tensor for name, tensor in block.state_dict().items()}
    layer.load_state_dict(renamed(state, HUGGING_FACE_NAMES))
    x = some_inputs(shape)
    assert_alike(gradients(block(x), [x]), gradients(first(layer(x)), [x]))


def routed_mixture(routing: Routing) -> tuple[Mixture, Tensor]:
    """A mixture, and tokens for which its router chooses as the routing does."""
    shape = model_shape("tiny-moe")
    mixture = Mixture(shape, device="cpu", dtype=torch.float32)
    stir(mixture)
    x = numbers(BATCH, Q_LEN, shape.d_model)
    wanted = numbers(routing.tokens, routing.experts).scatter_add(
        1, torch.tensor(routing.choices), torch.full((routing.tokens, routing.active), 10.0)
    )
    with torch.no_grad():
        mixture.router.weight.copy_((torch.linalg.pinv(x.flatten(0, 1)) @ wanted).T)
    return mixture, x.requires_grad_()


def test_forced_routing_that_is_the_routers_choice_changes_nothing() -> None:
    mixture, x = routed_mixture(ROUTING)
    inputs = [x, *mixture.parameters()]
    assert_alike(gradients(mixture(x, routing=prepare(ROUTING, "cpu")), inputs), gradients(mixture(x), inputs))


def test_forced_routing_overrules_the_router() -> None:
    mixture, x = routed_mixture(ROUTING)
    other = Routing(tokens=ROUTING.tokens, experts=4, active=2, kind="balanced")
    assert not torch.allclose(mixture(x, routing=prepare(other, "cpu")), mixture(x))


def test_dropped_pairs_add_nothing() -> None:
    mixture, x = routed_mixture(ROUTING)
    tight = Routing(tokens=ROUTING.tokens, experts=4, active=2, kind="skewed", capacity_factor=0.5)
    assert tight.choices.tolist() == ROUTING.choices.tolist()
    whole = mixture(x).flatten(0, 1)
    rest = mixture(x, routing=prepare(tight, "cpu")).flatten(0, 1)
    computed = torch.bincount(
        torch.tensor([token for tokens in tight.assignments() for token in tokens]), minlength=tight.tokens
    )
    assert set(computed.tolist()) == {0, 1, 2}
    assert torch.all(rest[computed == 0] == 0)
    torch.testing.assert_close(rest[computed == 2], whole[computed == 2])
    # What is left of a token keeps the weight that it had.
    token = computed.tolist().index(1)
    expert = next(number for number, tokens in enumerate(tight.assignments()) if token in tokens)
    row = x.flatten(0, 1)[token]
    weights = (mixture.router.weight @ row)[list(tight.choices[token])].softmax(dim=0)
    weight = weights[tight.choices[token].tolist().index(expert)]
    torch.testing.assert_close(rest[token], weight * mixture.experts[expert](row))


def test_routing_of_other_tokens_is_refused() -> None:
    mixture, x = routed_mixture(ROUTING)
    with pytest.raises(CaseError, match="routing: tokens=24 must be the 12 tokens of the input"):
        mixture(x[:1], routing=prepare(ROUTING, "cpu"))


def test_autocast_lowers_the_matmuls_but_not_the_router() -> None:
    mixture, x = routed_mixture(ROUTING)
    rows = x.flatten(0, 1)
    exact = mixture._logits(rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mixture._logits(rows), exact)
        assert mixture.experts[0](rows).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotation_keeps_the_data_type_of_what_it_turns(dtype: torch.dtype) -> None:
    turns = rotation(model_shape("tiny-llama"))
    assert turns is not None
    assert turns.turn(numbers(1, 4, Q_LEN, 32).to(dtype)).dtype == dtype


@pytest.mark.parametrize("name", TINY)
def test_compiler_sees_one_graph(name: str) -> None:
    """With a backend that does not generate code: that takes half a minute."""
    shape, block = model_shape(name), stirred_block(name)
    routing = prepare(ROUTING, "cpu") if shape.experts else None
    x = numbers(BATCH, Q_LEN, shape.d_model)
    torch.compiler.reset()
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    arguments: dict[str, Any] = {"rotation": rotation(shape), "routing": routing}
    assert_alike([compiled(x, **arguments)], [block(x, **arguments)])
