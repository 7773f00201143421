"""FLOPs against published parameter counts, the table of conventions, and numbers worked out by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.errors import CaseError
from perfsuite.flops import (
    MFU_CONVENTIONS,
    TRAINING_CONVENTIONS,
    Parts,
    attention_flops,
    attention_pairs,
    checkpointed,
    flops_by_dtype,
    hardware_flops,
    head_part,
    layer_parts,
    matmul_flops,
    model_flops,
    params_flops_per_token,
    repeated,
    trained,
    training_flops_per_token,
)
from perfsuite.models import MODELS, ModelShape, model_shape

SIZES = st.integers(min_value=1, max_value=64)


def test_matmul_is_two_operations_per_product() -> None:
    assert matmul_flops(m=8192, n=6144, k=4096) == 412_316_860_416
    assert matmul_flops(m=3, n=5, k=7, batch=2) == 420


@given(q_len=SIZES, extra=SIZES)
def test_causal_pairs_are_those_under_the_diagonal(q_len: int, extra: int) -> None:
    kv_len = q_len + extra - 1
    seen = sum(key <= kv_len - q_len + query for query in range(q_len) for key in range(kv_len))
    assert attention_pairs(q_len=q_len, kv_len=kv_len, causal=True) == seen


def test_pairs_by_hand() -> None:
    assert attention_pairs(q_len=4, kv_len=4, causal=True) == 10
    assert attention_pairs(q_len=1, kv_len=8192, causal=True) == 8192
    assert attention_pairs(q_len=3, kv_len=5, causal=False) == 15


def test_more_queries_than_keys_have_no_causal_mask() -> None:
    with pytest.raises(CaseError, match="q_len=5 must not exceed kv_len=4"):
        attention_pairs(q_len=5, kv_len=4, causal=True)


def test_attention_is_two_matmuls() -> None:
    full = attention_flops(batch=2, heads=4, q_len=32, kv_len=32, head_dim=16, causal=False)
    assert full == 4 * 2 * 4 * 32 * 32 * 16
    causal = attention_flops(batch=2, heads=4, q_len=32, kv_len=32, head_dim=16, causal=True)
    assert causal == 4 * 2 * 4 * (32 * 33 // 2) * 16


def test_values_may_be_narrower_than_keys() -> None:
    # Multi-head latent attention: keys of 192, values of 128.
    flops = attention_flops(batch=1, heads=1, q_len=2, kv_len=2, head_dim=192, value_dim=128, causal=False)
    assert flops == 2 * 4 * (192 + 128)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        # The released checkpoints' own counts.
        ("gpt2-124m", 124_439_808),
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_parameters_are_the_published_ones(model: str, parameters: int) -> None:
    assert MODELS[model].parameters() == parameters


def test_gpt3_has_175_billion_parameters() -> None:
    assert round(MODELS["gpt3-175b"].parameters() / 1e9) == 175


def test_six_n() -> None:
    assert params_flops_per_token(124_439_808) == 746_638_848


LENGTHS = {"gpt2-124m": 1024, "llama2-7b": 4096, "llama3-8b": 8192}


@pytest.mark.parametrize(
    ("convention", "gpt2", "llama2", "llama3"),
    [
        ("palm", 0.8599, 46.873, 61.067),
        ("torchtitan", 0.8599, 46.087, 57.914),
        ("megatron", 0.7980, 42.864, 51.470),
        ("hfu", 1.1465, 62.497, 81.422),
    ],
)
def test_conventions_in_gflop_per_token(convention: str, gpt2: float, llama2: float, llama3: float) -> None:
    for (model, seq_len), gflops in zip(LENGTHS.items(), (gpt2, llama2, llama3), strict=True):
        flops = training_flops_per_token(MODELS[model], seq_len=seq_len, convention=convention)
        assert flops / 1e9 == pytest.approx(gflops, rel=1e-3)


def test_six_n_in_gflop_per_token() -> None:
    for model, gflops in zip(LENGTHS, (0.7466, 40.430, 48.182), strict=True):
        assert params_flops_per_token(MODELS[model].parameters()) / 1e9 == pytest.approx(gflops, rel=1e-3)


def test_torchs_counter_is_our_parts_with_no_mask_looked_at() -> None:
    """Its figures on meta tensors: the three models of the table, forward and backward, in GFLOP per token."""
    for (model, seq_len), gflops in zip(LENGTHS.items(), (0.8544, 46.085, 57.913), strict=True):
        counted = sum(part.counted for part in step_parts(MODELS[model], batch=1, seq_len=seq_len))
        assert counted / seq_len / 1e9 == pytest.approx(gflops, rel=1e-3)


@pytest.mark.parametrize(("convention", "gflops"), [("palm", 286.7), ("torchtitan", 82.9), ("megatron", 79.7)])
def test_only_active_experts_count_but_for_palm(convention: str, gflops: float) -> None:
    flops = training_flops_per_token(MODELS["mixtral-8x7b"], seq_len=4096, convention=convention)
    assert flops / 1e9 == pytest.approx(gflops, rel=1e-2)


def step_parts(shape: ModelShape, *, batch: int, seq_len: int) -> Parts:
    """A training step's parts, layers and head."""
    layers = repeated(layer_parts(shape, batch=batch, q_len=seq_len), shape.layers)
    return trained((*layers, head_part(shape, tokens=batch * seq_len)))


@pytest.mark.parametrize("model", MODELS)
def test_a_tied_head_counts_as_an_untied_one(model: str) -> None:
    tied, untied = (replace(MODELS[model], tied=tied) for tied in (True, False))
    assert tied.parameters() < untied.parameters()
    assert training_flops_per_token(tied, seq_len=256) == training_flops_per_token(untied, seq_len=256)


@pytest.mark.parametrize("model", MODELS)
def test_exact_is_megatron_but_for_the_diagonal_and_the_padding(model: str) -> None:
    shape = MODELS[model]
    exact, megatron = (training_flops_per_token(shape, seq_len=1024, convention=name) for name in ("exact", "megatron"))
    padding = 128 * math.ceil(shape.vocab / 128) - shape.vocab
    # T(T+1)/2 pairs are T/2 a token and half of the diagonal's one.
    diagonal = 6 * shape.layers * shape.heads * shape.head_dim
    assert exact - megatron == diagonal - 6 * shape.d_model * padding


def test_megatron_pads_the_vocabulary_to_128() -> None:
    """GPT-2's 50257 entries become 50304; the diagonal is left."""
    gpt2 = MODELS["gpt2-124m"]
    padded = replace(gpt2, vocab=50304)
    exact, megatron = (
        training_flops_per_token(shape, seq_len=1024, convention=name)
        for shape, name in ((padded, "exact"), (gpt2, "megatron"))
    )
    assert exact - megatron == 6 * 12 * 12 * 64


TINY = ModelShape(layers=2, d_model=8, heads=2, kv_heads=1, head_dim=4, d_ff=16, vocab=10)


def test_exact_by_hand() -> None:
    # A layer: q and output 8x8 each, k and v 8x4 each: 192; MLP 3x8x16: 384. Head 8x10: 80. Six FLOPs a weight.
    weights = 2 * (192 + 384) + 80
    # Attention: 5 tokens keep 15 pairs, 3 a token; 4 Q forward, three times that in all, 2 layers of 2 heads.
    pairs = 3 * (4 * 4 * 3) * 2 * 2
    assert training_flops_per_token(TINY, seq_len=5) == 6 * weights + pairs


def test_router_counts_and_idle_experts_do_not() -> None:
    sparse = replace(TINY, experts=128, active_experts=1)
    router = 6 * 2 * 8 * 128
    dense = training_flops_per_token(TINY, seq_len=5)
    assert training_flops_per_token(sparse, seq_len=5) == dense + router


QWEN3_30B = ModelShape(
    layers=48,
    d_model=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    d_ff=768,
    vocab=151936,
    experts=128,
    active_experts=8,
)
"""Qwen3-30B-A3B (arXiv:2505.09388, table 2; its config.json), without the norms of queries and keys."""


def test_a_model_of_128_experts_costs_its_active_ones_and_the_router() -> None:
    """A report from the field: 192.9 GFLOP a token, where eight active experts of 128 need 37.6."""
    wrong = params_flops_per_token(QWEN3_30B.parameters()) + 12 * 48 * 2048 * 8192
    assert wrong / 1e9 == pytest.approx(192.9, abs=0.05)
    right = training_flops_per_token(QWEN3_30B, seq_len=8192, convention="torchtitan")
    assert right / 1e9 == pytest.approx(37.6, abs=0.05)
    few = replace(QWEN3_30B, experts=8)
    for convention in ("exact", "torchtitan", "megatron"):
        many_flops, few_flops = (
            training_flops_per_token(shape, seq_len=8192, convention=convention) for shape in (QWEN3_30B, few)
        )
        assert many_flops - few_flops == 6 * 48 * 2048 * 120  # of the router alone


def test_exact_counts_less_than_every_parameter_and_pair() -> None:
    for shape in MODELS.values():
        exact, palm = (training_flops_per_token(shape, seq_len=1024, convention=name) for name in ("exact", "palm"))
        assert exact < palm


def test_unknown_convention_lists_the_known_ones() -> None:
    with pytest.raises(CaseError, match="'chinchilla' is not known; use one of exact, palm"):
        training_flops_per_token(TINY, seq_len=5, convention="chinchilla")


# By component


def test_the_parts_of_a_layer_by_hand() -> None:
    """Two sequences of five tokens: 10 tokens, each head keeps 15 of 25 pairs, of which two matmuls are made."""
    parts = layer_parts(TINY, batch=2, q_len=5)
    assert {part.name: part.forward for part in parts} == {
        "qkv": 2 * 10 * 8 * (8 + 4 + 4),
        "attention": 2 * 2 * (2 * 2 * 15 * 4),
        "attention_out": 2 * 10 * 8 * 8,
        "mlp_up": 2 * 10 * 8 * 32,
        "mlp_down": 2 * 10 * 16 * 8,
    }
    assert [part.unmasked for part in parts if part.unmasked is not None] == [2 * 2 * (2 * 2 * 25 * 4)]
    assert model_flops(parts) == hardware_flops(parts) == sum(part.forward for part in parts)


def test_a_decoded_token_sees_the_whole_cache() -> None:
    attention = next(part for part in layer_parts(TINY, batch=3, q_len=1, kv_len=100) if part.name == "attention")
    assert attention.forward == attention.counted == 3 * 2 * 4 * 100 * 4


def test_ungated_models_have_one_matrix_up() -> None:
    parts = layer_parts(replace(TINY, gated=False), batch=1, q_len=1)
    up, down = (next(part for part in parts if part.name == name) for name in ("mlp_up", "mlp_down"))
    assert up.forward == down.forward == 2 * 8 * 16


def test_the_parts_of_a_mixture_by_hand() -> None:
    shape = replace(TINY, experts=4, active_experts=2)
    parts = {part.name: part for part in layer_parts(shape, batch=2, q_len=5, router_dtype="fp32")}
    assert parts["router"].forward == 2 * 10 * 8 * 4
    assert parts["mlp_down"].forward == 2 * 20 * 16 * 8
    assert flops_by_dtype(parts.values(), dtype="bf16") == (
        ("bf16", model_flops(parts.values()) - 640),
        ("fp32", 640),
    )
    dropped = {part.name: part for part in layer_parts(shape, batch=2, q_len=5, routed=17)}
    assert dropped["mlp_up"].forward == 2 * 17 * 8 * 32
    assert dropped["router"] == replace(parts["router"], dtype=None)


def test_a_backward_pass_is_two_forward_passes() -> None:
    parts = step_parts(MODELS["gpt2-124m"], batch=2, seq_len=64)
    assert all(part.backward == 2 * part.forward for part in parts)
    assert model_flops(parts) == hardware_flops(parts) == 3 * sum(part.forward for part in parts)


def test_recomputation_is_hardwares_and_not_the_models() -> None:
    """A dense layer's last matmul is not done again; a mixture weighs the outputs of its experts, and does it again."""
    dense = layer_parts(TINY, batch=2, q_len=5)
    parts = trained(checkpointed(dense))
    assert model_flops(parts) == model_flops(trained(dense))
    assert hardware_flops(parts) - model_flops(parts) == model_flops(dense) - 2 * 10 * 16 * 8
    mixture = layer_parts(replace(TINY, experts=4, active_experts=2), batch=2, q_len=5)
    assert hardware_flops(trained(checkpointed(mixture))) == 4 * model_flops(mixture)


def test_a_checkpointed_block_of_gpt2_runs_1_242_times_its_flops() -> None:
    """By torch's counter at 1024 tokens, attention in full; not 4/3, since the last matmul is not done again."""
    block = layer_parts(MODELS["gpt2-124m"], batch=1, q_len=1024)
    kept, again = (sum(part.counted for part in trained(parts)) for parts in (block, checkpointed(block)))
    assert again / kept == pytest.approx(1.242, abs=5e-4)


def test_accumulation_multiplies_the_tokens_and_not_a_tokens_flops() -> None:
    once = step_parts(MODELS["tiny-gpt"], batch=2, seq_len=64)
    four = repeated(once, 4)
    assert (
        model_flops(four) == 4 * model_flops(once) == model_flops(step_parts(MODELS["tiny-gpt"], batch=8, seq_len=64))
    )
    assert [part.counted for part in four] == [4 * part.counted for part in once]
    again = trained(checkpointed(layer_parts(TINY, batch=1, q_len=8)))
    assert hardware_flops(repeated(again, 4)) == 4 * hardware_flops(again)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Any decoder: dense or a mixture, gated or not, heads of any size in groups of any size."""
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    experts = draw(st.sampled_from((0, 1, 4, 9)))
    return ModelShape(
        layers=draw(st.integers(1, 5)),
        d_model=draw(SIZES),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=2 * draw(SIZES),
        d_ff=draw(SIZES),
        vocab=draw(SIZES),
        gated=draw(st.booleans()),
        tied=draw(st.booleans()),
        experts=experts,
        active_experts=draw(st.integers(1, experts)) if experts else 0,
    )


@given(shape=shapes(), batch=st.integers(1, 3), seq_len=SIZES)
def test_parts_add_up_to_exact(shape: ModelShape, batch: int, seq_len: int) -> None:
    parts = step_parts(shape, batch=batch, seq_len=seq_len)
    assert model_flops(parts) == training_flops_per_token(shape, seq_len=seq_len) * batch * seq_len
    assert sum(part.counted for part in parts) >= model_flops(parts)


def test_the_pages_table_is_what_is_computed() -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "flop-conventions.md"
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in page.read_text("utf-8").splitlines()]
    lengths = {**LENGTHS, "mixtral-8x7b": 4096}
    found = {row[0]: row[1:] for row in rows if len(row) == 1 + len(lengths)}
    for convention in TRAINING_CONVENTIONS:
        flops = [
            training_flops_per_token(MODELS[name], seq_len=each, convention=convention)
            for name, each in lengths.items()
        ]
        assert found[convention] == _gflops(flops)
    assert found["6 N"] == _gflops([params_flops_per_token(MODELS[name].parameters()) for name in lengths])
    counted = [
        sum(part.counted for part in step_parts(MODELS[name], batch=1, seq_len=each)) / each
        for name, each in lengths.items()
    ]
    assert found["torch's counter on meta tensors"] == _gflops(counted)


def _gflops(flops: Iterable[float]) -> list[str]:
    """As the page writes them: three decimals below 10."""
    return [f"{each / 1e9:.{3 if each < 1e10 else 2}f}" for each in flops]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"heads": 0}, "heads=0 must be a whole number of at least 1"),
        ({"kv_heads": 3}, "heads=4 must be a multiple of kv_heads=3"),
        ({"head_dim": 31}, "head_dim=31 must be even"),
        ({"rope_theta": 0}, "rope_theta=0 must be a finite number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta=nan must be a finite number above 0"),
        ({"positions": 8192}, "positions=8192 goes with gated=False"),
        ({"bias": True}, "bias=True goes with gated=False"),
        ({"experts": 2, "active_experts": 3}, "active_experts=3 must lie between 1 and experts=2"),
        ({"experts": 2}, "active_experts=0 must lie between 1 and experts=2"),
    ],
)
def test_sizes_that_cannot_be_are_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CaseError, match=re.escape(complaint)):
        replace(MODELS["tiny-llama"], **change)


@pytest.mark.parametrize(
    ("name", "given"), [(["tiny-moe"], "list"), (MODELS["tiny-moe"], "ModelShape"), (None, "NoneType"), (7, "int")]
)
def test_a_preset_is_called_by_a_string(name: Any, given: str) -> None:
    with pytest.raises(CaseError) as caught:
        model_shape(name)
    assert str(caught.value) == f"model must be a preset's name, not of type {given}; use one of {', '.join(MODELS)}"


def test_other_peoples_conventions_leave_out_our_own_and_hfus() -> None:
    assert {*MFU_CONVENTIONS} == {*TRAINING_CONVENTIONS} - {"exact", "hfu"}
