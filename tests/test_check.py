"""Looking at a step's result before anything is timed: is it a number, and is it its reference's?"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from perfsuite.measure.attempt import attempt
from perfsuite.measure.check import DisagreementError, NotANumberError, check_agreement, check_numbers
from perfsuite.verdict import Outcome
from perfsuite.workloads.base import Built
from perfsuite.workloads.kernel import Kernel
from tests.test_attempt import SPEC, cpu_bench, failed

NAN = math.nan


def agree(result: object, reference: object, **tolerances: float) -> bool:
    try:
        check_agreement(result, reference, rtol=tolerances.get("rtol"), atol=tolerances.get("atol"))
    except DisagreementError:
        return False
    return True


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
    ],
    ids=str,
)
def test_nan_in_a_tensor_of_any_type(dtype: torch.dtype) -> None:
    clean = torch.ones(2, 3).to(dtype)
    check_numbers(clean)
    spoiled = torch.tensor([1.0, NAN]).to(dtype)
    with pytest.raises(NotANumberError, match="result holds NaN: the work was not done"):
        check_numbers(spoiled)


@pytest.mark.parametrize(
    "result",
    [
        np.array([1.0, NAN]),
        np.array([1.0, NAN], dtype=np.float16),
        np.array([complex(0, NAN)]),
        np.float32(NAN),
        np.float64(NAN),
        NAN,
        complex(0, NAN),
    ],
    ids=repr,
)
def test_nan_outside_tensors(result: object) -> None:
    with pytest.raises(NotANumberError):
        check_numbers(result)


@pytest.mark.parametrize(
    ("result", "place"),
    [
        ({"loss": 1.0, "grads": [torch.ones(2), torch.tensor([NAN])]}, "result['grads'][1]"),
        ((1.0, {"a": ({"b": NAN},)}), "result[1]['a'][0]['b']"),
    ],
)
def test_nan_in_nested_results_is_found_and_named(result: object, place: str) -> None:
    with pytest.raises(NotANumberError) as caught:
        check_numbers(result)
    assert str(caught.value).startswith(f"{place} holds NaN")


@pytest.mark.parametrize(
    "result",
    [
        None,
        1,
        "text",
        math.inf,
        torch.tensor([1, 2]),
        torch.tensor([True]),
        torch.ones(2, dtype=torch.int8),
        torch.empty(0),
        np.array(["text"]),
        np.array([1, 2]),
        {},
        [],
        object(),
    ],
)
def test_what_is_a_number_or_none_at_all_passes(result: object) -> None:
    check_numbers(result)


def test_an_untouched_poisoned_output_is_found() -> None:
    from perfsuite.workloads.tensors import poisoned

    with pytest.raises(NotANumberError):
        check_numbers(poisoned((4, 4), torch.float32, "cpu"))


# Agreement


def test_tolerances_left_out_are_torchs_for_the_data_type() -> None:
    """fp32: rtol 1.3e-6, atol 1e-5; bf16: rtol 1.6e-2."""
    one = torch.ones(8)
    assert agree(one, one + 1e-6)
    assert not agree(one, one + 1e-4)
    assert agree(one.bfloat16(), (one + 1 / 128).bfloat16())
    assert not agree(one.bfloat16(), (one + 1 / 32).bfloat16())


@pytest.mark.parametrize(
    ("difference", "tolerances", "expected"),
    [
        (0.1, {"rtol": 0.2}, True),
        (0.1, {"rtol": 0.01}, False),
        (0.1, {"atol": 0.2}, True),
        (0.1, {"atol": 0.01}, False),
        (0.1, {"rtol": 0.01, "atol": 0.1}, True),
        (1e-6, {"rtol": 0.0}, False),  # 0 is a tolerance, not one left out
        (1e-6, {"atol": 0.0}, False),
        (0.0, {"rtol": 0.0}, True),
        (0.0, {"atol": 0.0}, True),
    ],
)
def test_tolerances_given_hold(difference: float, tolerances: dict[str, float], expected: bool) -> None:
    assert agree(torch.ones(4), torch.ones(4) + difference, **tolerances) is expected


def test_a_relative_tolerance_alone_allows_nothing_at_zero() -> None:
    assert not agree(torch.full((2,), 1e-7), torch.zeros(2), rtol=0.5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bit_floats_take_tolerances(dtype: torch.dtype) -> None:
    """torch's own comparison of them is of bits alone, and refuses any tolerance."""
    ones, more = torch.ones(4).to(dtype), torch.full((4,), 1.25).to(dtype)
    assert agree(ones, ones.clone())
    assert not agree(ones, more)
    assert agree(ones, more, rtol=0.3)
    assert not agree(ones, more, rtol=0.1)
    assert agree([ones], [more], atol=0.3)


@pytest.mark.parametrize(
    ("result", "reference", "named"),
    [
        (torch.ones(3), torch.ones(4), "shape"),
        (torch.ones(3), torch.ones(3, 1), "shape"),
        (torch.ones(3), torch.ones(3).bfloat16(), "dtype"),
        (torch.ones(3), torch.ones(3, dtype=torch.int64), "dtype"),
        (torch.ones(3), None, "None"),
        ([torch.ones(3)], [torch.ones(3)] * 2, "length"),
        ({"a": torch.ones(3)}, {"b": torch.ones(3)}, "keys"),
        (torch.ones(3), torch.full((3,), NAN), "close"),
    ],
)
def test_results_that_are_not_alike_disagree(result: object, reference: object, named: str) -> None:
    with pytest.raises(DisagreementError, match=f"^the step's result is not its reference's: .*{named}") as caught:
        check_agreement(result, reference, rtol=None, atol=None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("result", "reference"),
    [
        (None, None),
        (torch.ones(2, 3), torch.ones(3, 2).t()),  # memory lies otherwise
        ({"a": [torch.ones(2), 3]}, {"a": (torch.ones(2), 3)}),
        (torch.ones(2, requires_grad=True), torch.ones(2)),
        (2.5, 2.5),
        (torch.ones(2, dtype=torch.int8), torch.ones(2, dtype=torch.int8)),
    ],
)
def test_containers_layout_and_gradients_do_not_matter(result: object, reference: object) -> None:
    check_agreement(result, reference, rtol=None, atol=None)


def test_numpy_is_compared_with_torch() -> None:
    assert agree(torch.arange(4.0), np.arange(4, dtype=np.float32))
    assert agree(np.arange(4.0), torch.arange(4.0, dtype=torch.float64))
    assert not agree(torch.arange(4.0), np.arange(4, dtype=np.float32) + 1)
    assert not agree(torch.arange(4.0), np.arange(4, dtype=np.float64))


def test_numpy_views_that_torch_does_not_take_as_they_are() -> None:
    """A view that runs backwards, and an array that must not be written to."""
    read_only = np.arange(4, dtype=np.float32)
    read_only.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert agree(torch.arange(4.0), np.arange(4, dtype=np.float32)[::-1][::-1])
        assert agree(torch.arange(4.0).flip(0), np.arange(4, dtype=np.float32)[::-1])
        assert agree(torch.arange(4.0), read_only)


def test_the_compared_results_are_left_as_they_are() -> None:
    array: np.ndarray[Any, Any] = np.arange(4, dtype=np.float32)
    tensor = torch.ones(4).to(torch.float8_e4m3fn)
    check_agreement([array, tensor], [array, tensor], rtol=0.1, atol=None)
    assert array.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert tensor.dtype is torch.float8_e4m3fn


# What an attempt makes of it


def pair(result: object, reference: object, **rest: Any) -> Kernel:
    return Kernel(lambda device: ((lambda: result), (lambda: reference)), flops=1, **rest)


def test_a_step_that_is_not_its_reference_is_incorrect() -> None:
    failure = failed(attempt(pair(torch.ones(4), torch.zeros(4)), SPEC, cpu_bench()))
    assert failure.outcome is Outcome.INCORRECT
    assert failure.reason.startswith("the step's result is not its reference's:")


@pytest.mark.parametrize("tolerance", ["rtol", "atol"])
def test_the_cases_own_tolerance_holds(tolerance: str) -> None:
    """Within it the clock is asked next, which stands still."""
    near, ones = torch.full((4,), 1.01), torch.ones(4)
    outcomes = {
        value: failed(attempt(pair(near, ones, **{tolerance: value}), SPEC, cpu_bench())).outcome
        for value in (0.001, 0.1)
    }
    assert outcomes == {0.001: Outcome.INCORRECT, 0.1: Outcome.ERROR}


def test_nan_is_an_error_before_it_is_compared() -> None:
    spoiled = torch.tensor([math.nan])
    failure = failed(attempt(pair(spoiled, spoiled), SPEC, cpu_bench()))
    assert failure.outcome is Outcome.ERROR
    assert failure.reason.startswith("result holds NaN")


@pytest.mark.parametrize(
    ("built", "shown"),
    [
        (None, "NoneType"),
        (torch.ones(1), "Tensor"),
        ([print, print], "list"),
        ((), "()"),
        ((print,), "(builtin_function_or_method)"),
        ((print, None), "(builtin_function_or_method, NoneType)"),
        ((print, print, print), f"({', '.join(['builtin_function_or_method'] * 3)})"),
    ],
)
def test_a_build_that_returns_something_else_is_an_error(built: Any, shown: str) -> None:
    def build(device: str) -> Built:
        return built  # type: ignore[no-any-return]

    failure = failed(attempt(Kernel(build, flops=1), SPEC, cpu_bench()))
    assert failure.outcome is Outcome.ERROR
    assert failure.reason == f"build returned {shown}: return the step, or (step, reference), both callable"
