"""Memory by formula against what autograd saves, against measured peaks, and against published numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from perfsuite.errors import CaseError
from perfsuite.footprint import (
    head_activations,
    kv_cache_bytes,
    largest_batch,
    layer_activations,
    training_memory,
)
from perfsuite.measure.memory import peak_memory_bytes
from perfsuite.models import MODELS, ModelShape
from perfsuite.units import GB
from perfsuite.workloads.modules.cache import KeyValueCache
from perfsuite.workloads.modules.layers import Block, rotation_for
from perfsuite.workloads.modules.transformer import Transformer, initialize
from perfsuite.workloads.routing import Routing, prepare
from tests.module_support import one_thread


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


BATCH, LENGTH = 2, 32
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"itemsize": 4},
    "bf16": {"itemsize": 2},
    "autocast": {"itemsize": 2, "autocast": True},
    "fp32-math": {"itemsize": 4, "attention": "math"},
    "bf16-math": {"itemsize": 2, "attention": "math"},
}


class Layer:
    """One block of a preset on random input, as a form of it runs."""

    def __init__(self, shape: ModelShape, form: dict[str, Any], *, grad: bool = True) -> None:
        self.form = form
        dtype = torch.bfloat16 if form["itemsize"] == 2 and not form.get("autocast") else torch.float32
        self.block = Block(shape, device="cpu", dtype=dtype)
        initialize(self.block, 1)
        self.x = torch.randn(BATCH, LENGTH, shape.d_model, dtype=dtype, requires_grad=grad)
        tokens = BATCH * LENGTH
        self.routing = (
            prepare(Routing(tokens=tokens, experts=shape.experts, active=shape.active_experts), "cpu")
            if shape.experts
            else None
        )
        positions = range(LENGTH)
        self.rotation = rotation_for(shape, positions=positions, device="cpu", dtype=dtype) if shape.gated else None

    def forward(self) -> torch.Tensor:
        with (
            torch.autocast("cpu", torch.bfloat16) if self.form.get("autocast") else nullcontext(),
            sdpa_kernel(SDPBackend.MATH) if self.form.get("attention") == "math" else nullcontext(),
        ):
            out: torch.Tensor = self.block(self.x, rotation=self.rotation, routing=self.routing)
            return out

    def saved_bytes(self) -> int:
        """What autograd saves, each storage once, without parameters, the routing and the rotation."""
        given: list[torch.Tensor] = [*self.block.parameters()]
        if self.routing is not None:
            given += [self.routing.chosen, *self.routing.pairs]
        apart = {each.untyped_storage().data_ptr() for each in given}
        found: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape != (LENGTH, self.block.attention.shape.head_dim):  # the rotation, shared by all layers
                found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.forward()
        return sum(each.untyped_storage().nbytes() for place, each in found.items() if place not in apart)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("model", ["tiny-gpt", "tiny-llama", "tiny-moe"])
def test_a_layer_keeps_what_autograd_saves(model: str, form: dict[str, Any]) -> None:
    shape = MODELS[model]
    predicted = layer_activations(shape, batch=BATCH, seq_len=LENGTH, fused_norm=False, **form)
    assert predicted == pytest.approx(Layer(shape, form).saved_bytes(), rel=0.005)


def test_a_dense_layer_is_exact() -> None:
    predicted = layer_activations(MODELS["tiny-gpt"], batch=BATCH, seq_len=LENGTH, itemsize=4)
    assert predicted == Layer(MODELS["tiny-gpt"], FORMS["fp32"]).saved_bytes()


def test_korthikantis_layer_without_dropout_and_scores() -> None:
    # arXiv:2205.05198, table 2: s b h (34 + 5 a s / h) in 16 bit, of which 2 are masks of dropout and the scores go.
    s, b, h, a = 2048, 3, 12288, 96
    statistics = 4 * s * b * (2 * 2 + a)
    assert layer_activations(MODELS["gpt3-175b"], batch=b, seq_len=s, itemsize=2) == 32 * s * b * h + statistics


def test_math_attention_keeps_the_scores() -> None:
    shape = MODELS["gpt2-124m"]
    fused, unfused = (
        layer_activations(shape, batch=1, seq_len=1024, itemsize=4, attention=kind) for kind in ("fused", "math")
    )
    assert unfused - fused == 12 * 1024**2 * 4 - 12 * 1024 * 4
    with pytest.raises(CaseError, match="attention='flash' must be one of fused, math"):
        layer_activations(shape, batch=1, seq_len=1024, itemsize=4, attention="flash")


def test_a_checkpointed_layer_keeps_its_input() -> None:
    shape = MODELS["llama3-8b"]
    assert layer_activations(shape, batch=2, seq_len=8192, itemsize=2, checkpoint=True) == 2 * 8192 * 4096 * 2
    wide = layer_activations(shape, batch=2, seq_len=8192, itemsize=2, checkpoint=True, autocast=True)
    assert wide == 2 * 8192 * 4096 * 4


def test_dropped_pairs_keep_nothing() -> None:
    shape = MODELS["tiny-moe"]
    full, none = (
        layer_activations(shape, batch=BATCH, seq_len=LENGTH, itemsize=4, routed=routed) for routed in (None, 0)
    )
    pair = 3 * 128 * 4 + 4 * 256 * 4 + 4 + 8  # in, out and weighed; gate, up, activation, product; weight; place
    assert full - none == 2 * BATCH * LENGTH * pair


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp32-math"])
@pytest.mark.parametrize("model", ["tiny-gpt", "tiny-llama", "tiny-moe"])
def test_forward_alone_peaks_where_measured(model: str, form: str) -> None:
    layer = Layer(MODELS[model], FORMS[form], grad=False)
    with torch.no_grad():
        measured = peak_memory_bytes(layer.forward, "cpu")
    predicted = layer_activations(MODELS[model], batch=BATCH, seq_len=LENGTH, backward=False, **FORMS[form])
    assert predicted == pytest.approx(measured, rel=0.15)


def test_head_and_loss() -> None:
    shape = replace(MODELS["tiny-gpt"], vocab=4096)
    tokens = 96
    x = torch.randn(tokens, shape.d_model)
    model = Transformer(shape, device="cpu", dtype=torch.float32)
    initialize(model, 1)

    def step() -> None:
        model.zero_grad()
        # The graph ends at the weights: the gradient of the input is not part of the head.
        loss = cross_entropy(model.head(model.norm(x)), torch.zeros(tokens, dtype=torch.int64))
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped

    measured = peak_memory_bytes(step, "cpu")
    predicted = head_activations(shape, tokens=tokens, itemsize=4)
    assert predicted - x.nbytes == pytest.approx(measured, rel=0.03)


def test_cache_of_keys_and_values() -> None:
    # Llama-2-7B in fp16 keeps half a MiB a token.
    assert kv_cache_bytes(MODELS["llama2-7b"], batch=1, length=1, itemsize=2) == 512 * 1024
    shape = MODELS["tiny-llama"]
    cache = KeyValueCache(shape, batch=3, length=7, layers=1, device="cpu", dtype=torch.float32)
    assert kv_cache_bytes(shape, batch=3, length=7, itemsize=4, layers=1) == cache.store.nbytes


def test_sixteen_bytes_a_parameter() -> None:
    # Rajbhandari et al. (arXiv:1910.02054), section 3.1: parameters, gradients and Adam's state in fp32, 16 bytes.
    shape = MODELS["llama3-8b"]
    parts = training_memory(shape, batch=1, seq_len=1, itemsize=4)
    model = parts["parameters"] + parts["gradients"] + parts["optimizer_state"]
    assert 16 * shape.parameters() <= model <= 1.05 * 16 * shape.parameters()
    assert sum(parts.values()) > 80 * GB


def test_no_gradients_at_the_end_of_the_forward_pass() -> None:
    parts = training_memory(MODELS["gpt2-124m"], batch=32, seq_len=1024, itemsize=4)
    assert parts["gradients"] == 0
    layers = 12 * layer_activations(MODELS["gpt2-124m"], batch=32, seq_len=1024, itemsize=4)
    assert parts["activations"] == layers + head_activations(MODELS["gpt2-124m"], tokens=32 * 1024, itemsize=4)
    later = training_memory(MODELS["gpt2-124m"], batch=32, seq_len=1024, itemsize=4, accumulate=2)
    assert later["gradients"] == parts["parameters"]


def test_an_optimizer_may_hold_the_most() -> None:
    plain, foreach = (
        training_memory(MODELS["llama2-7b"], batch=1, seq_len=1, itemsize=4, optimizer_temporaries=count)
        for count in (0, 1)
    )
    assert sum(foreach.values()) > sum(plain.values())
    assert foreach["temporaries"] == 4 * MODELS["llama2-7b"].parameters()


@given(batch=st.integers(1, 64), more=st.integers(1, 64), checkpoint=st.booleans())
def test_memory_grows_with_the_batch(batch: int, more: int, checkpoint: bool) -> None:
    small, large = (
        sum(training_memory(MODELS["gpt2-124m"], batch=b, seq_len=64, itemsize=4, checkpoint=checkpoint).values())
        for b in (batch, batch + more)
    )
    assert small < large


@given(fixed=st.integers(0, 100), each=st.integers(1, 100), free=st.integers(0, 10_000), most=st.integers(1, 200))
def test_largest_batch_fits_and_the_next_does_not(fixed: int, each: int, free: int, most: int) -> None:
    found = largest_batch(lambda batch: fixed + batch * each, free, most=most)
    fitting = [batch for batch in range(1, most + 1) if fixed + batch * each <= free]
    assert found == (fitting[-1] if fitting else None)


def test_nothing_is_known_of_a_batch_without_a_prediction() -> None:
    assert largest_batch(lambda _: None, 10**12) is None
