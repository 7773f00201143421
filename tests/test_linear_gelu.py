"""A linear layer with its GELU, fused and not: one amount of work, one result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from perfsuite.errors import CaseError
from perfsuite.measure.check import check_agreement, prepared
from perfsuite.measure.memory import peak_memory_bytes
from perfsuite.workloads.base import Target
from perfsuite.workloads.counting import count_flops
from perfsuite.workloads.linear_gelu import LinearGelu
from tests.module_support import one_thread

TOKENS, D_IN, D_OUT = 24, 32, 64


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def linear_gelu(**changes: Any) -> LinearGelu:
    return LinearGelu(**{"tokens": TOKENS, "d_in": D_IN, "d_out": D_OUT, **changes})


def test_both_forms_are_the_same_work() -> None:
    plain, fused = linear_gelu().work(), linear_gelu(fused=True).work()
    assert plain == fused
    assert plain.flops == 2 * 24 * 32 * 64
    assert plain.nbytes == 4 * (24 * 32 + 32 * 64 + 64 + 24 * 64)
    assert plain.tokens == 24


def test_a_backward_pass_is_twice_the_forward() -> None:
    forward, both = linear_gelu().work(), linear_gelu(backward=True).work()
    assert both.flops == 3 * (forward.flops or 0)
    assert both.nbytes == 2 * (forward.nbytes or 0)


@pytest.mark.parametrize("changes", [{"fused": True}, {"fused": True, "dtype": "bf16"}, {"execution": "compile"}])
def test_every_form_gives_the_same(changes: dict[str, Any]) -> None:
    workload = linear_gelu(**changes)
    built = workload.build("cpu")
    assert built.reference is not None
    check_agreement(built.step(), built.reference(), rtol=workload.rtol, atol=workload.atol)


def test_gradients_are_those_of_all_three_operands() -> None:
    _, *gradients = linear_gelu(backward=True).build("cpu").step()
    assert [tuple(gradient.shape) for gradient in gradients] == [(24, 32), (64, 32), (64,)]


@pytest.mark.parametrize("changes", [{}, {"fused": True}, {"backward": True}])
def test_torchs_counter_agrees(changes: dict[str, Any]) -> None:
    workload = linear_gelu(**changes)
    assert count_flops(prepared(workload.build("meta")).step) == sum(part.counted for part in workload.parts())


@pytest.mark.parametrize("tokens", [24, 512])
@pytest.mark.parametrize("changes", [{}, {"fused": True}, {"backward": True}])
def test_predicted_memory_is_what_is_measured(changes: dict[str, Any], tokens: int) -> None:
    workload = linear_gelu(tokens=tokens, **changes)
    built = workload.build("cpu")
    assert built.resident_bytes is not None
    assert workload.memory_bytes() == (peak_memory_bytes(built.step, "cpu") or 0) + built.resident_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "LinearGelu: tokens=0 must be a whole number"),
        ({"fused": "yes"}, "LinearGelu: fused='yes' must be True or False"),
        ({"execution": "jit"}, "LinearGelu: execution='jit' must be one of"),
        ({"dtype": "int8"}, "LinearGelu: dtype='int8' must be one of"),
        ({"fused": True, "backward": True}, "LinearGelu: backward=True needs fused=False"),
        ({"fused": True, "execution": "compile"}, "LinearGelu: execution='compile' needs fused=False"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        linear_gelu(**changes)


def test_what_a_device_lacks_is_said() -> None:
    cpu, xpu = Target(backend="cpu", sku="cpu-x"), Target(backend="xpu", sku="x")
    assert linear_gelu(fused=True).unsupported(cpu) is None
    assert linear_gelu(fused=True).unsupported(xpu) == "which GELU torch fuses on xpu is not known"
    assert linear_gelu(execution="graph").unsupported(cpu) == "CUDA graphs need a GPU"
    assert linear_gelu(dtype="tf32").unsupported(cpu) == "no TF32"
