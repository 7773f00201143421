"""Whole models: parameters, caches, starting numbers, and the FLOPs that are declared of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from perfsuite.errors import CaseError
from perfsuite.flops import FlopPart, checkpointed, head_part, layer_parts, repeated, trained
from perfsuite.models import MODELS, model_shape
from perfsuite.workloads.counting import count_flops
from perfsuite.workloads.modules.cache import KeyValueCache
from perfsuite.workloads.modules.transformer import Transformer, initialize
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
    some_tokens,
    stirred_model,
)

PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_shape(name: str) -> None:
    shape = model_shape(name)
    model = Transformer(shape, device="meta", dtype=torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == shape.parameters()
    assert count == PARAMETERS.get(name, count)
    assert sum(parameter.numel() for parameter in model.blocks[0].parameters()) == shape.layer_parameters()


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("prefilled", [0, 5])
def test_decoding_gives_prefills_logits(name: str, prefilled: int) -> None:
    shape, model = model_shape(name), stirred_model(name)
    tokens = some_tokens(shape)
    cache = KeyValueCache(shape, batch=BATCH, length=Q_LEN, layers=shape.layers, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        whole = model(tokens)
        parts = [model(tokens[:, :prefilled], cache=cache)] if prefilled else []
        places = range(prefilled, Q_LEN)
        parts += [model(tokens[:, start : start + 1], cache=cache, start=start) for start in places]
        assert_alike([torch.cat(parts, dim=1)], [whole])
        assert_alike([model(tokens, last_only=True)], [whole[:, -1:]])


def test_cache_holds_what_was_written_and_no_more() -> None:
    shape = model_shape("tiny-llama")
    cache = KeyValueCache(shape, batch=1, length=4, layers=2, device="cpu", dtype=torch.float32)
    assert cache.store.shape == (2, 2, 1, shape.kv_heads, 4, shape.head_dim)
    written = [numbers(1, shape.kv_heads, 2, shape.head_dim, seed=seed) for seed in range(4)]
    cache.update(1, written[0], written[1], 0)
    keys, values = cache.update(1, written[2], written[3], 2)
    assert torch.equal(keys, torch.cat((written[0], written[2]), dim=2))
    assert torch.equal(values, torch.cat((written[1], written[3]), dim=2))
    assert cache.store[0].count_nonzero() == 0
    with pytest.raises(CaseError, match="cache: length=4 must be at least 5 to hold 5 positions"):
        cache.update(0, written[0], written[1], 3)


def test_part_of_a_prompt_after_cached_positions_is_refused() -> None:
    shape, model = model_shape("tiny-gpt"), stirred_model("tiny-gpt")
    cache = KeyValueCache(shape, batch=BATCH, length=20, layers=2, device="cpu", dtype=torch.float32)
    with pytest.raises(CaseError, match="attention: q_len=12 after 5 cached positions is neither"), torch.no_grad():
        model(some_tokens(shape), cache=cache, start=5)


def test_no_more_tokens_than_learned_positions() -> None:
    shape = model_shape("tiny-gpt")
    model = Transformer(shape, device="meta", dtype=torch.float32)
    with pytest.raises(CaseError, match="transformer: 257 tokens are more than positions=256"):
        model(torch.zeros((1, 257), dtype=torch.int64, device="meta"))


def test_tied_head_is_the_embedding() -> None:
    tied, untied = (Transformer(model_shape(name), device="meta", dtype=torch.float32) for name in TINY[:2])
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight


@pytest.mark.parametrize("name", TINY)
def test_checkpointing_changes_no_gradient(name: str) -> None:
    found = []
    for checkpoint in (False, True):
        model = stirred_model(name, checkpoint=checkpoint)
        found.append(gradients(model(some_tokens(model.shape)), model.parameters()))
    assert all(map(torch.equal, *found))


def test_initialize_sets_gpt2s_numbers_from_the_seed() -> None:
    models = [Transformer(model_shape("tiny-gpt"), device="cpu", dtype=torch.float32) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        initialize(model, seed)
    state, same, other = (model.state_dict() for model in models)
    assert all(torch.equal(state[name], same[name]) for name in state)
    for name, tensor in state.items():
        if tensor.ndim > 1:
            assert not torch.equal(tensor, other[name])
            assert tensor.mean().item() == pytest.approx(0.0, abs=5e-4)
            assert tensor.std().item() == pytest.approx(0.02, rel=0.02)
        else:
            assert tensor.unique().tolist() == [0.0 if name.endswith("bias") else 1.0]


def test_initialize_leaves_meta_alone() -> None:
    model = Transformer(model_shape("tiny-moe"), device="meta", dtype=torch.float32)
    initialize(model, 1)
    assert model.head.weight.is_meta


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_fp32_parameters(name: str, dtype: torch.dtype) -> None:
    model = stirred_model(name)
    tokens = some_tokens(model.shape)
    with torch.autocast("cpu", dtype=dtype):
        out = model(tokens)
    assert out.dtype == dtype
    assert all(gradient.dtype == torch.float32 for gradient in gradients(out, model.parameters())[1:])
    plain = model(tokens)
    assert (out - plain).norm().item() < 0.05 * plain.norm().item()


@pytest.mark.parametrize("name", TINY[:2])
def test_caller_chooses_the_attention_kernel(name: str) -> None:
    model = stirred_model(name)
    found = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            found.append(gradients(model(some_tokens(model.shape)), model.parameters()))
    assert_alike(*found)


def counted(parts: Iterable[FlopPart]) -> int:
    """What the flop counter is to say."""
    return sum(part.counted for part in parts)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_steps_flops_are_those_of_its_parts(name: str, checkpoint: bool) -> None:
    shape = model_shape(name)
    model = Transformer(shape, device="meta", dtype=torch.bfloat16, checkpoint=checkpoint)
    tokens = torch.zeros((BATCH, Q_LEN), dtype=torch.int64, device="meta")
    routing = Routing(tokens=ROUTING.tokens, experts=4, active=2, kind="skewed", capacity_factor=1.0)
    assert routing.dropped > 0
    ready = prepare(routing, "meta") if shape.experts else None
    layer = trained(layer_parts(shape, batch=BATCH, q_len=Q_LEN, routed=routing.kept if shape.experts else None))
    layers = repeated(checkpointed(layer) if checkpoint else layer, shape.layers)
    parts = (*layers, *trained((head_part(shape, tokens=BATCH * Q_LEN),)))
    assert count_flops(lambda: model(tokens, routing=ready).sum().backward()) == counted(parts)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("q_len", [1, Q_LEN])
def test_flops_of_inference_are_those_of_its_parts(name: str, q_len: int) -> None:
    shape = model_shape(name)
    model = Transformer(shape, device="meta", dtype=torch.bfloat16)
    cache = KeyValueCache(shape, batch=BATCH, length=Q_LEN, layers=2, device="meta", dtype=torch.bfloat16)
    tokens = torch.zeros((BATCH, q_len), dtype=torch.int64, device="meta")
    ready = prepare(Routing(tokens=BATCH * q_len, experts=4, active=2), "meta") if shape.experts else None
    parts = repeated(layer_parts(shape, batch=BATCH, q_len=q_len, kv_len=Q_LEN), shape.layers)
    head = head_part(shape, tokens=BATCH)

    def step() -> None:
        with torch.no_grad():
            model(tokens, cache=cache, start=Q_LEN - q_len, last_only=True, routing=ready)

    assert count_flops(step) == counted((*parts, head))
