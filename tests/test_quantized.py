"""The weight-only quantized layer: bytes by hand, results against its dequantised weight, and what is refused."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.errors import CaseError
from perfsuite.measure.check import DisagreementError, check_agreement
from perfsuite.measure.memory import peak_memory_bytes
from perfsuite.workloads.base import Prepared, Target
from perfsuite.workloads.counting import count_flops
from perfsuite.workloads.quantized import QuantizedGemv

CPU = Target(backend="cpu", sku="cpu-test")
A100 = Target(backend="cuda", sku="a100", compute_capability="8.0")
T4 = Target(backend="cuda", sku="t4", compute_capability="7.5")
FORMS: list[dict[str, Any]] = [{"bits": 8}, *({"bits": 4, "group": group} for group in (32, 64, 128, 256))]


def compared(layer: QuantizedGemv, built: Prepared, result: torch.Tensor) -> None:
    """What an attempt does with a step's result."""
    assert built.reference is not None
    check_agreement(result, built.reference(), rtol=layer.rtol, atol=layer.atol)


def test_bytes_by_hand() -> None:
    # Llama-3-8B's MLP: 58,720,256 weights; each of 14336 outputs has a scale, or one and an offset for 128 inputs.
    eight = QuantizedGemv(n=14336, k=4096, bits=8)
    assert eight.work().nbytes == 58_720_256 + 2 * 14336 + 2 * (4096 + 14336)
    four = QuantizedGemv(n=14336, k=4096, bits=4, group=128, batch=8)
    assert four.work().nbytes == 29_360_128 + 2 * 2 * 14336 * 32 + 2 * 8 * (4096 + 14336)
    assert QuantizedGemv(n=16, k=32, bits=4, group=32, dtype="fp32").work().nbytes == 256 + 4 * (32 + 32 + 16)


def test_flops_are_those_of_the_dense_layer() -> None:
    for form in FORMS:
        work = QuantizedGemv(n=32, k=512, batch=3, **form).work()
        assert (work.flops, work.flop_convention, work.tokens) == (2 * 3 * 32 * 512, "exact", 3)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_kernel_multiplies_by_the_dequantised_weight(form: dict[str, Any], dtype: str) -> None:
    layer = QuantizedGemv(n=48, k=512, batch=5, dtype=dtype, **form)
    built = layer.build("cpu")
    result = built.step()
    assert result.shape == (5, 48)
    compared(layer, built, result)
    assert 0.5 < float(result.float().std()) < 2, "the tolerance is meant for results of size 1"


@given(
    n=st.integers(1, 6), k=st.integers(1, 6), batch=st.integers(1, 9), group=st.sampled_from([None, 32, 64, 128, 256])
)
@settings(max_examples=25)
def test_any_shape_that_is_accepted_runs(n: int, k: int, batch: int, group: int | None) -> None:
    layer = QuantizedGemv(n=16 * n, k=k * (group or 16), batch=batch, bits=4 if group else 8, group=group)
    built = layer.build("cpu")
    compared(layer, built, built.step())
    assert layer.memory_bytes() == layer.work().nbytes


@pytest.mark.parametrize("form", [FORMS[0], FORMS[1]], ids=str)
def test_a_wrong_result_is_noticed(form: dict[str, Any]) -> None:
    layer = QuantizedGemv(n=64, k=256, **form)
    built = layer.build("cpu")
    for fault in (lambda y: y * 1.1, lambda y: y.roll(1, dims=-1), torch.zeros_like):
        with pytest.raises(DisagreementError):
            compared(layer, built, fault(built.step()))


def test_two_builds_hold_the_same_numbers() -> None:
    layer = QuantizedGemv(n=32, k=64, bits=4, group=32)
    assert torch.equal(layer.build("cpu").step(), layer.build("cpu").step())


def test_the_unpacked_weight_is_not_kept() -> None:
    layer = QuantizedGemv(n=256, k=1024, bits=4, group=128)
    built = layer.build("cpu")
    assert built.resident_bytes is not None
    resident = built.resident_bytes()
    assert isinstance(built.step, partial)
    tensors = [argument for argument in built.step.args if isinstance(argument, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) == resident == (layer.work().nbytes or 0) - 2 * 256
    peak = peak_memory_bytes(built.step, "cpu")
    assert peak is not None
    assert peak + resident == pytest.approx(layer.memory_bytes(), rel=0.05)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_counter_agrees_on_meta(form: dict[str, Any]) -> None:
    layer = QuantizedGemv(n=32, k=512, batch=3, **form)
    assert count_flops(layer.build("meta").step) == sum(part.counted for part in layer.parts())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"n": 0}, "QuantizedGemv: n=0 must be a whole number of at least 1"),
        ({"k": 40}, "QuantizedGemv: k=40 must be a multiple of 16"),
        ({"n": 24}, "QuantizedGemv: n=24 must be a multiple of 16"),
        ({"batch": True}, "QuantizedGemv: batch=True must be"),
        ({"bits": 3}, "QuantizedGemv: bits=3 must be 4 or 8"),
        ({"bits": "8"}, "QuantizedGemv: bits='8' must be 4 or 8"),
        ({"bits": 4.0, "group": 32}, "QuantizedGemv: bits=4.0 must be 4 or 8"),
        ({"bits": 8.0}, "QuantizedGemv: bits=8.0 must be 4 or 8"),
        ({"bits": True}, "QuantizedGemv: bits=True must be 4 or 8"),
        ({"bits": 4, "group": 32.0}, "QuantizedGemv: group=32.0 must be one of 32, 64, 128, 256 with bits=4"),
        ({"bits": 4, "group": True}, "QuantizedGemv: group=True must be one of 32, 64, 128, 256 with bits=4"),
        ({"bits": 8, "group": 32}, "QuantizedGemv: group=32 goes with bits=4"),
        ({"bits": 4}, "QuantizedGemv: group=None must be one of 32, 64, 128, 256 with bits=4"),
        ({"bits": 4, "group": 48}, "QuantizedGemv: group=48 must be one of 32, 64, 128, 256"),
        ({"bits": 4, "group": 256}, "QuantizedGemv: k=64 must be a multiple of group=256"),
        ({"dtype": "fp64"}, "QuantizedGemv: dtype='fp64' must be one of fp32, bf16, fp16"),
        ({"dtype": "int8"}, "QuantizedGemv: dtype='int8' must be one of"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CaseError, match=re.escape(complaint)):
        QuantizedGemv(**{"n": 32, "k": 64, **arguments})


@pytest.mark.parametrize(
    ("arguments", "target", "reason"),
    [
        ({}, CPU, None),
        ({"bits": 4, "group": 32}, CPU, None),
        ({}, A100, None),
        ({"dtype": "fp32"}, T4, None),
        ({}, T4, "bf16 needs compute capability 8.0, this device's is 7.5"),
        ({"bits": 4, "group": 32}, A100, None),
        ({"bits": 4, "group": 32}, T4, "torch's int4 kernel needs compute capability 8.0, this device's is 7.5"),
        ({"bits": 4, "group": 32, "dtype": "fp16"}, A100, "takes bf16 activations on CUDA, not fp16"),
        ({}, Target(backend="rocm", sku="x"), "for CPUs and CUDA devices only"),
    ],
)
def test_it_knows_where_it_cannot_run(arguments: dict[str, Any], target: Target, reason: str | None) -> None:
    said = QuantizedGemv(n=32, k=64, **arguments).unsupported(target)
    assert said is None if reason is None else reason in (said or "")


def test_a_cpu_is_held_against_a_matmul() -> None:
    layer = QuantizedGemv(n=32, k=64)
    assert (layer.metric, layer.cpu_control()) == ("mbu", "matmul")
    assert layer.describe() == {
        "kind": "quantized_gemv",
        "fill": "random",
        "dtype": "bf16",
        "n": 32,
        "k": 64,
        "batch": 1,
        "bits": 8,
        "group": None,
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_cuda_kernel_multiplies_by_the_dequantised_weight(form: dict[str, Any]) -> None:
    layer = QuantizedGemv(n=4096, k=4096, **form)
    built = layer.build("cuda")
    compared(layer, built, built.step())
