"""Prefill and decoding: FLOPs, bytes and memory by hand; a cache gives the logits that a prefill gives."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from perfsuite.errors import CaseError
from perfsuite.measure.check import DisagreementError, check_agreement, prepared
from perfsuite.measure.memory import peak_memory_bytes
from perfsuite.models import model_shape
from perfsuite.workloads import inference
from perfsuite.workloads.base import Target
from perfsuite.workloads.counting import count_flops
from perfsuite.workloads.generation import Generation
from perfsuite.workloads.inference import Decode, Prefill
from perfsuite.workloads.modules.cache import KeyValueCache
from tests.module_support import BATCH, Q_LEN, one_thread, some_tokens, stirred_model

CPU = Target(backend="cpu", sku="cpu-x")
HOPPER = Target(backend="cuda", sku="h100", compute_capability="9.0")

# tiny-llama: 2 layers of width 128, 4 heads of 32, 2 for keys and values, MLP of 384; 512 tokens, head not tied.
LAYER = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 384
NORM, HEAD = 128, 512 * 128
MODELS = ("tiny-gpt", "tiny-llama", "tiny-moe")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def decode(**changes: Any) -> Decode:
    return Decode(**{"model": "tiny-llama", "batch": 2, "context": 7, **changes})


def prefill(**changes: Any) -> Prefill:
    return Prefill(**{"model": "tiny-llama", "batch": 2, "seq_len": 8, **changes})


def session(step: Any) -> Any:
    """What a step works on: it is a method with arguments."""
    return step.func.__self__


def test_decode_flops_by_hand() -> None:
    # 2 tokens; each of 4 heads of 32 looks at 8 positions, in both layers; the head for each token.
    by_layer = 2 * 2 * LAYER + 2 * 2 * 4 * 8 * 32 * 2
    assert decode().work().flops == 2 * by_layer + 2 * 2 * HEAD
    assert decode().work().tokens == 2
    assert decode(layers=5).work().flops == 5 * by_layer + 2 * 2 * HEAD


def test_prefill_flops_by_hand() -> None:
    # 16 tokens; 36 pairs under each mask; the head for the last token of each sequence alone.
    by_layer = 2 * 16 * LAYER + 2 * 2 * 4 * 36 * 32 * 2
    assert prefill().work().flops == 2 * by_layer + 2 * 2 * HEAD
    assert prefill().work().tokens == 16


def test_decode_bytes_by_hand() -> None:
    weights = 2 * (LAYER + 2 * NORM) + NORM + HEAD
    rows = 2 * 128
    cache = 2 * 2 * 2 * 64 * (7 + 1)  # seven positions read, one written
    logits = 2 * 512
    assert decode().work().nbytes == 4 * (weights + rows + cache + logits) + 2 * 8
    assert decode(dtype="bf16").work().nbytes == 2 * (weights + rows + cache + logits) + 2 * 8


def test_a_tied_head_is_read_once_and_one_position_with_it() -> None:
    shape = model_shape("tiny-gpt")
    held = shape.parameters() - (256 - 1) * 128
    cache, logits = 2 * 2 * 2 * 128 * 8, 2 * 512
    assert decode(model="tiny-gpt").work().nbytes == 4 * (held + cache + logits) + 2 * 8


def test_prefill_writes_the_cache_and_looks_up_no_row_twice() -> None:
    weights = 2 * (LAYER + 2 * NORM) + NORM + HEAD
    cache, logits = 2 * 2 * 2 * 64, 2 * 512
    assert prefill().work().nbytes == 4 * (weights + 16 * 128 + cache * 8 + logits) + 16 * 8
    # The table has 512 rows, however many tokens there are.
    assert prefill(seq_len=300).work().nbytes == 4 * (weights + HEAD + cache * 300 + logits) + 600 * 8


def test_a_mixture_reads_the_experts_that_it_uses() -> None:
    one, two, four = ((decode(model="tiny-moe", batch=batch).work().nbytes or 0) for batch in (1, 2, 4))
    each_sequence = 4 * (128 + 2 * 2 * 64 * 8 + 512) + 8
    assert two - one == each_sequence + 4 * 2 * 2 * (3 * 128 * 256)  # two more experts in each of two layers
    assert four - two == 2 * each_sequence  # there are no more


def test_decoding_is_judged_by_the_bytes_it_reads() -> None:
    assert decode().metric == "mbu"
    assert decode().cpu_control() == "memmove"
    assert prefill().cpu_control() == "matmul"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("make", [partial(decode, context=60), partial(prefill, seq_len=60)], ids=["decode", "prefill"])
def test_predicted_memory_is_what_is_measured(make: Any, model: str) -> None:
    workload: Generation = make(model=model)
    built = prepared(workload.build("cpu"))
    assert built.resident_bytes is not None
    measured = (peak_memory_bytes(built.step, "cpu") or 0) + built.resident_bytes()
    assert workload.memory_bytes() == pytest.approx(measured, rel=0.03)
    assert set(workload.memory_parts()) == {"parameters", "kv_cache", "activations"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("make", [decode, prefill])
def test_torchs_counter_agrees(make: Any, model: str) -> None:
    workload = make(model=model, dtype="bf16", execution="compile")
    assert count_flops(prepared(workload.build("meta")).step) == sum(part.counted for part in workload.parts())


@pytest.mark.parametrize("model", ["tiny-gpt", "tiny-llama"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_decoding_gives_the_logits_of_a_prefill(model: str, dtype: str) -> None:
    workload = decode(model=model, dtype=dtype, context=20)
    built = workload.build("cpu")
    for _ in range(2):  # each step is the first one again
        assert built.reference is not None
        check_agreement(built.step(), built.reference(), rtol=workload.rtol, atol=workload.atol)


def test_a_wrong_cache_is_noticed() -> None:
    workload = decode(context=20)
    built = workload.build("cpu")
    assert built.reference is not None
    session(built.step).cache.store.zero_()
    with pytest.raises(DisagreementError):
        check_agreement(built.step(), built.reference(), rtol=workload.rtol, atol=workload.atol)


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_is_the_same_as_at_once(name: str) -> None:
    model = stirred_model(name).requires_grad_(False)
    tokens = some_tokens(model.shape)
    cache = KeyValueCache(model.shape, batch=BATCH, length=Q_LEN, layers=2, device="cpu", dtype=torch.float32)
    model(tokens[:, :-3], cache=cache, last_only=True)
    single = [model(tokens[:, place : place + 1], cache=cache, start=place) for place in range(Q_LEN - 3, Q_LEN)]
    torch.testing.assert_close(torch.cat(single, dim=1), model(tokens)[:, -3:], rtol=1e-4, atol=1e-4)


def test_a_reference_that_takes_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "REFERENCE_FLOPS", {"cpu": 1.0})
    built = decode().build("cpu")
    assert built.reference is None
    store = session(built.step).cache.store
    assert 0.9 < store.std().item() < 1.1  # not zeros, which are cheap to read and to multiply
    assert decode(execution="compile").build("cpu").reference is not None


def test_a_mixture_has_no_prefill_to_compare_with() -> None:
    assert decode(model="tiny-moe").build("cpu").reference is None


def test_a_prompts_logits_are_the_last_tokens() -> None:
    built = prefill().build("cpu")
    held = session(built.step)
    assert built.step().shape == (2, 1, 512)
    torch.testing.assert_close(built.step(), held.model(held.tokens)[:, -1:])
    assert built.reference is None


@pytest.mark.parametrize("make", [decode, prefill])
def test_a_model_is_captured_whole_and_gives_the_same(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    workload = make(execution="compile", layers=1)
    built = workload.build("cpu")
    check_agreement(built.step(), built.reference(), rtol=workload.rtol, atol=workload.atol)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (decode, {"model": "gpt5"}, "model='gpt5' is not known"),
        (decode, {"batch": 0}, "Decode: batch=0 must be a whole number"),
        (decode, {"layers": 0}, "Decode: layers=0 must be a whole number"),
        (decode, {"context": 0}, "Decode: context=0 must be a whole number"),
        (decode, {"execution": "jit"}, "Decode: execution='jit' must be one of"),
        (decode, {"dtype": "fp64"}, "Decode: dtype='fp64' must be one of"),
        (decode, {"model": "tiny-gpt", "context": 256}, "context=256 must be at most 255: tiny-gpt has 256 positions"),
        (prefill, {"seq_len": True}, "Prefill: seq_len=True must be a whole number"),
        (prefill, {"model": "tiny-gpt", "seq_len": 257}, "seq_len=257 must be at most 256"),
    ],
)
def test_what_cannot_be_is_named(make: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        make(**changes)


def test_what_a_device_lacks_is_said() -> None:
    assert decode().unsupported(CPU) is None
    assert decode(execution="graph").unsupported(CPU) == "CUDA graphs need a GPU"
    assert decode(execution="graph").unsupported(HOPPER) is None
    assert prefill(dtype="tf32").unsupported(CPU) == "no TF32"


def test_the_record_says_how_many_layers_and_how_it_ran() -> None:
    assert decode().describe()["layers"] == 2
    assert decode(layers=1, execution="graph").describe()["layers"] == 1
    assert decode(execution="graph").launch() == "graph"
