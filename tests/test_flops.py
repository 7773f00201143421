"""FLOPs against published parameter counts, the table of conventions, and numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.errors import CaseError
from perfsuite.flops import (
    attention_flops,
    attention_pairs,
    matmul_flops,
    params_flops_per_token,
    training_flops_per_token,
)
from perfsuite.models import MODELS, ModelShape

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
    lengths = {"gpt2-124m": (1024, gpt2), "llama2-7b": (4096, llama2), "llama3-8b": (8192, llama3)}
    for model, (seq_len, gflops) in lengths.items():
        flops = training_flops_per_token(MODELS[model], seq_len=seq_len, convention=convention)
        assert flops / 1e9 == pytest.approx(gflops, abs=6e-4)


@pytest.mark.parametrize(("convention", "gflops"), [("palm", 286.7), ("torchtitan", 82.9), ("megatron", 79.7)])
def test_only_active_experts_count_but_for_palm(convention: str, gflops: float) -> None:
    flops = training_flops_per_token(MODELS["mixtral-8x7b"], seq_len=4096, convention=convention)
    assert flops / 1e9 == pytest.approx(gflops, abs=0.05)


TINY = ModelShape(layers=2, d_model=8, heads=2, kv_heads=1, head_dim=4, d_ff=16, vocab=10)


def test_exact_by_hand() -> None:
    # A layer: q and output 8x8 each, k and v 8x4 each: 192; MLP 3x8x16: 384. Head 8x10: 80. Six FLOPs a weight.
    weights = 2 * (192 + 384) + 80
    # Attention: 5 tokens keep 15 pairs, 3 a token; 4 Q forward, three times that in all, 2 layers of 2 heads.
    pairs = 3 * (4 * 4 * 3) * 2 * 2
    assert training_flops_per_token(TINY, seq_len=5) == 6 * weights + pairs


def test_router_counts_and_idle_experts_do_not() -> None:
    sparse = ModelShape(
        layers=2,
        d_model=8,
        heads=2,
        kv_heads=1,
        head_dim=4,
        d_ff=16,
        vocab=10,
        experts=128,
        active_experts=1,
    )
    router = 6 * 2 * 8 * 128
    dense = training_flops_per_token(TINY, seq_len=5)
    assert training_flops_per_token(sparse, seq_len=5) == dense + router


def test_exact_counts_less_than_every_parameter_and_pair() -> None:
    for shape in MODELS.values():
        exact, palm = (training_flops_per_token(shape, seq_len=1024, convention=name) for name in ("exact", "palm"))
        assert exact < palm


def test_unknown_convention_lists_the_known_ones() -> None:
    with pytest.raises(CaseError, match="'chinchilla' is not known; use one of exact, palm"):
        training_flops_per_token(TINY, seq_len=5, convention="chinchilla")
