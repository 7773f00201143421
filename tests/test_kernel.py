"""Kernel: any callable, what it declares, and the FLOPs that are counted where it does not."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from perfsuite import Kernel, Work
from perfsuite.errors import CaseError, UncountableError
from perfsuite.workloads.counting import count_flops

Step = Callable[[], Any]


def build(device: str) -> Step:
    a = torch.ones(3, 5, device=device)
    b = torch.ones(5, 7, device=device)
    return lambda: a @ b


def with_reference(device: str) -> tuple[Step, Step]:
    x = torch.ones(4, device=device)
    return (lambda: x + x), (lambda: 2 * x)


class Builder:
    """A callable object."""

    def __call__(self, device: str) -> Step:
        return build(device)


def test_build_is_the_users_function() -> None:
    step = Kernel(build, flops=210).build("cpu")
    assert callable(step)
    assert step().shape == (3, 7)
    both = Kernel(with_reference).build("cpu")
    assert isinstance(both, tuple)
    assert torch.equal(both[0](), both[1]())


def test_given_flops_are_declared_and_missing_ones_counted() -> None:
    assert Kernel(build, flops=210, nbytes=284).work() == Work(flops=210, nbytes=284, flop_convention="declared")
    assert Kernel(build, flops=2e9).work().flops == 2_000_000_000
    assert Kernel(build).work() == Work(flops=None, nbytes=None, flop_convention="counted")
    assert Kernel(build, flops=0).work().flop_convention == "declared"
    assert Kernel(build).memory_bytes() is None


@pytest.mark.parametrize("argument", ["flops", "nbytes"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 0.5, "2e9", True])
def test_a_count_that_is_none_is_named(argument: str, value: Any) -> None:
    with pytest.raises(CaseError, match=re.escape(f"Kernel: {argument}={value!r} must be")):
        Kernel(build, **{argument: value})


@pytest.mark.parametrize("argument", ["rtol", "atol"])
@pytest.mark.parametrize("value", [-1e-3, float("nan"), "1e-3", True])
def test_a_tolerance_that_is_none_is_named(argument: str, value: Any) -> None:
    with pytest.raises(CaseError, match=re.escape(f"Kernel: {argument}={value!r} must be")):
        Kernel(build, **{argument: value})


def test_a_step_instead_of_a_builder_is_refused() -> None:
    with pytest.raises(CaseError, match="Kernel: build=7 must be callable"):
        Kernel(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("builder", "name"),
    [
        (build, "build"),
        (lambda device: lambda: device, "<lambda>"),
        (functools.partial(functools.partial(build), "cpu"), "build"),
        (Builder(), "Builder"),
        (Builder().__call__, "Builder.__call__"),
    ],
    ids=["function", "lambda", "partial", "object", "method"],
)
def test_description_holds_a_name_and_no_address(builder: Any, name: str) -> None:
    description = Kernel(builder, flops=1).describe()
    assert description["build"] == f"{__name__}.{name}"
    assert description["fill"] == "own"
    assert "0x" not in str(description)


@given(m=st.integers(1, 9), n=st.integers(1, 9), k=st.integers(1, 9))
def test_matmuls_count_two_operations_per_product(m: int, n: int, k: int) -> None:
    a, b, bias = torch.ones(m, k), torch.ones(k, n), torch.ones(n)
    flops = 2 * m * n * k
    assert count_flops(lambda: a @ b) == flops
    assert count_flops(lambda: torch.addmm(bias, a, b)) == flops
    assert count_flops(lambda: torch.bmm(a.expand(4, m, k), b.expand(4, k, n))) == 4 * flops
    assert count_flops(lambda: b.T @ a[0]) == 2 * n * k
    assert count_flops(lambda: torch.addmv(bias, b.T, a[0])) == 2 * n * k
    assert count_flops(lambda: a[0] @ a[0]) == 2 * k


def test_what_surrounds_a_matmul_is_free() -> None:
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert count_flops(lambda: torch.einsum("ij,jk->ik", a, b).relu().softmax(-1).argmax(-1)) == 210


def test_eight_bit_matmuls_count_though_torchs_counter_says_nothing() -> None:
    a, b = torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)
    with FlopCounterMode(display=False) as counter:
        torch._int_mm(a, b)
    assert counter.get_total_flops() == 0
    assert count_flops(lambda: torch._int_mm(a, b)) == 2 * 32 * 8 * 16


def test_convolution() -> None:
    image, weight = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3)
    # 6x6 outputs of 4 channels, each 3x3x3 products.
    assert count_flops(lambda: functional.conv2d(image, weight)) == 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)


def test_attention_on_a_cpu_is_not_zero() -> None:
    batch, heads, seq_len, head_dim = 2, 4, 32, 16
    query = torch.ones(batch, heads, seq_len, head_dim, requires_grad=True)
    forward = 4 * batch * heads * seq_len**2 * head_dim

    def attend() -> Any:
        return functional.scaled_dot_product_attention(query, query, query)

    with FlopCounterMode(display=False) as counter:
        attend()
    assert counter.get_total_flops() == 0  # the silence that count_flops is there to break
    assert count_flops(attend) == forward
    # Fused kernels compute the scores again on the way back: 2.5 times the forward.
    assert count_flops(lambda: attend().sum().backward()) == forward * 7 // 2


def test_attention_without_a_fused_kernel_counts_the_same() -> None:
    query = torch.ones(1, 2, 8, 4)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        flops = count_flops(lambda: functional.scaled_dot_product_attention(query, query, query, attn_mask=mask))
    assert flops == 4 * 2 * 8 * 8 * 4


@pytest.mark.parametrize(("foreach", "fused"), [(False, False), (True, False), (False, True)])
def test_training_step_counts_its_matmuls_alone(foreach: bool, fused: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach, fused=fused)
    x, label = torch.randn(5, 8), torch.zeros(5, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(functional.dropout(model(x), 0.1), label))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()
    # The input needs no gradient, so the first layer has two matmuls and the second three.
    assert count_flops(step) == 2 * (2 * 5 * 8 * 16) + 3 * (2 * 5 * 16 * 4)


@torch.library.custom_op("perfsuite_test::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    """An operator of someone's own, of which torch knows nothing but its name."""
    return x @ x


def test_an_unknown_operator_is_named() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(UncountableError, match=r"no FLOP formula for perfsuite_test\.opaque.*give flops="):
        count_flops(lambda: opaque(x) + x @ x)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (lambda: torch.fft.fft(torch.ones(8)), "aten._fft"),
        (lambda: torch.linalg.cholesky(torch.eye(4)), "aten.linalg_cholesky_ex"),
        (lambda: torch.linalg.inv(torch.eye(4)), "aten.linalg_inv_ex"),
        (lambda: torch.cdist(torch.ones(40, 4), torch.ones(40, 4)), "aten._cdist_forward|aten._euclidean_dist"),
    ],
)
def test_torchs_own_operators_without_a_formula_are_named(step: Step, name: str) -> None:
    with pytest.raises(UncountableError, match=name):
        count_flops(step)


def test_work_that_torch_cannot_see_is_not_zero_flops() -> None:
    with pytest.raises(UncountableError, match="ran no torch operator that computes; give flops="):
        count_flops(lambda: torch.empty(4).view(2, 2))
    with pytest.raises(UncountableError, match="ran no torch operator"):
        count_flops(list)


def test_elementwise_work_is_zero_flops() -> None:
    x = torch.ones(4, 4)
    assert count_flops(lambda: torch.stack([(x + x).mul_(2).cumsum(0).sort().values.clone()])) == 0


def test_errors_of_the_step_pass_through() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        count_flops(lambda: torch.ones(2, 3) @ torch.ones(2, 3))
