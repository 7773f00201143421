"""Attention: FLOPs and bytes by hand, numbers against the formula with an explicit mask, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from perfsuite.errors import CaseError
from perfsuite.measure.memory import peak_memory_bytes
from perfsuite.workloads import attention_kernels
from perfsuite.workloads.attention import Attention
from perfsuite.workloads.attention_formula import AttentionTensors, Formula
from perfsuite.workloads.attention_kernels import BACKENDS
from perfsuite.workloads.base import Target
from perfsuite.workloads.counting import count_flops

CPU = Target(backend="cpu", sku="cpu-test")
T4 = Target(backend="cuda", sku="t4", compute_capability="7.5")
H100 = Target(backend="cuda", sku="h100", compute_capability="9.0")
MI300X = Target(backend="rocm", sku="mi300x", compute_capability="gfx942")

# Square, lower right, one query, without a mask; each with a head of keys for every query head, or for two.
SHAPES = [(40, 40, True), (24, 40, True), (1, 40, True), (24, 40, False), (40, 24, False)]
ON_CPU = ("auto", "flash", "math")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in a worker on a CPU: kernels hold a buffer for each thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attention(**changes: Any) -> Attention:
    return Attention(**{"batch": 2, "heads": 4, "q_len": 40, "head_dim": 16, **changes})


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """The formula with an explicit mask, keys and values repeated for their query heads."""
    share = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(share, dim=1) for each in (k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        seen = seen.tril(k.shape[2] - q.shape[2])
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[3])
    return torch.einsum("bhqk,bhkd->bhqd", scores.where(seen, -math.inf).softmax(-1), v)


def tensors_of(workload: Attention) -> AttentionTensors:
    """The tensors of a build's step."""
    step: Any = workload.build("cpu").step
    return next(argument for argument in step.args if isinstance(argument, AttentionTensors))


class Multiplied(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Keeps the data types that matmuls are done in."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.bmm:
            self.dtypes |= {operand.dtype for operand in args}
        return func(*args, **(kwargs or {}))


def test_row_three_of_the_field_reports() -> None:
    # 32 heads of 128 over 16384 tokens: 4 H D T(T+1)/2 FLOPs. Every pair counted would be 4 H D T^2, nearly twice that.
    causal, full = (
        Attention(heads=32, q_len=16384, head_dim=128, causal=causal, dtype="bf16") for causal in (1 > 0, 1 < 0)
    )
    assert causal.work().flops == 4 * 32 * 128 * 16384 * 16385 // 2 == 2_199_157_473_280
    assert full.work().flops == 4 * 32 * 128 * 16384**2 == 4_398_046_511_104
    assert causal.work().flop_convention == "exact"
    # 189 TFLOP/s on a peak of 312 are 61 %; with every pair counted the same step reads as 121 %.
    seconds = (causal.work().flops or 0) / 189e12
    assert (causal.work().flops or 0) / seconds / 312e12 == pytest.approx(0.606, abs=1e-3)
    assert (full.work().flops or 0) / seconds / 312e12 == pytest.approx(1.21, abs=5e-3)


def test_flops_by_hand() -> None:
    # 2 sequences, 4 heads of 16; pairs: 820 of 40 x 40 causal, 684 of 24 x 40 lower right, 40 for the last query.
    for q_len, pairs in ((40, 820), (24, 684), (1, 40)):
        forward = 2 * 2 * 4 * pairs * 2 * 16
        assert attention(q_len=q_len, kv_len=40).work().flops == forward
        trained = attention(q_len=q_len, kv_len=40, backward=True).work()
        assert (trained.flops, trained.hardware_flops, trained.tokens) == (3 * forward, 3 * forward, 2 * q_len)
    assert attention(kv_heads=2).work().flops == attention().work().flops


def test_bytes_by_hand() -> None:
    # In bf16 q and the output are 2 x 4 x 24 x 16 elements each, k and v 2 x 2 x 40 x 16 each.
    grouped = attention(q_len=24, kv_len=40, kv_heads=2, dtype="bf16")
    assert grouped.work().nbytes == 2 * (2 * 3072 + 2 * 2560)
    # Backward: the output's gradient is read too, and the gradients of q, k and v are written.
    trained = attention(q_len=24, kv_len=40, kv_heads=2, dtype="bf16", backward=True)
    assert trained.work().nbytes == 2 * (4 * 3072 + 4 * 2560)


def test_math_widens_narrow_types() -> None:
    assert dict(attention(backend="math", dtype="bf16").work().flops_by_dtype).keys() == {"fp32"}
    assert dict(attention(backend="flash", dtype="bf16").work().flops_by_dtype).keys() == {"bf16"}
    assert dict(attention(backend="math", dtype="tf32").work().flops_by_dtype).keys() == {"tf32"}
    step = attention(backend="math", dtype="bf16").build("cpu").step
    with Multiplied() as multiplied:
        step()
    assert multiplied.dtypes == {torch.float32}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("q_len", "kv_len", "causal"), SHAPES)
@pytest.mark.parametrize("backend", ON_CPU)
def test_numbers_are_the_formulas(
    backend: str, q_len: int, kv_len: int, causal: bool, kv_heads: int, backward: bool
) -> None:
    workload = attention(
        q_len=q_len, kv_len=kv_len, kv_heads=kv_heads, causal=causal, backend=backend, backward=backward
    )
    built = workload.build("cpu")
    assert built.check is not None
    assert built.check() is None
    tensors = tensors_of(workload)
    operands = [each.detach().clone().requires_grad_() for each in (tensors.query, tensors.key, tensors.value)]
    wanted = by_hand(*operands, causal=causal)
    if tensors.gradient is None:
        torch.testing.assert_close(built.step(), wanted.detach(), rtol=1e-4, atol=1e-5)
        return
    gradients = torch.autograd.grad(wanted, operands, tensors.gradient)
    torch.testing.assert_close(built.step(), (wanted, *gradients), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp64", "bf16", "fp16"])
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_other_data_types_pass_their_own_check(backend: str, dtype: str) -> None:
    workload = attention(q_len=300, kv_len=400, backend=backend, dtype=dtype, backward=True)
    built = workload.build("cpu")
    assert built.check is not None
    assert built.check() is None


@given(
    q_len=st.integers(1, 20),
    more=st.integers(0, 20),
    share=st.integers(1, 3),
    causal=st.booleans(),
    trained=st.booleans(),
)
@settings(max_examples=30)
def test_any_shape_that_is_accepted_runs(q_len: int, more: int, share: int, causal: bool, trained: bool) -> None:
    workload = attention(heads=2 * share, kv_heads=2, q_len=q_len, kv_len=q_len + more, causal=causal, backward=trained)
    built = workload.build("cpu")
    assert built.check is not None
    assert built.check() is None


def test_gradients_do_not_add_up() -> None:
    workload = attention(backward=True)
    step = workload.build("cpu").step
    for first, second in zip(step(), step(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("backend", "q_len", "kv_len", "causal"),
    [*(("auto", *shape) for shape in SHAPES), *((each, 24, 40, True) for each in BACKENDS[1:])],
)
def test_the_counter_agrees_on_meta_where_masks_are_not_looked_at(
    backend: str, q_len: int, kv_len: int, causal: bool
) -> None:
    for backward, kv_heads in ((False, 4), (True, 2)):
        workload = attention(
            q_len=q_len, kv_len=kv_len, causal=causal, backend=backend, backward=backward, kv_heads=kv_heads
        )
        counted = count_flops(workload.build("meta").step)
        assert counted == sum(part.counted for part in workload.parts())
        assert counted == (3 if backward else 1) * 4 * 2 * 4 * q_len * kv_len * 16


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("q_len", "kv_len", "causal"), [SHAPES[0], SHAPES[1], SHAPES[3]])
def test_flex_sees_what_the_mask_shows(monkeypatch: pytest.MonkeyPatch, q_len: int, kv_len: int, causal: bool) -> None:
    # Uncompiled, since compiling takes ten seconds a shape.
    monkeypatch.setattr(attention_kernels, "compiled", lambda function, device: function)
    for kv_heads in (4, 2):
        workload = attention(q_len=q_len, kv_len=kv_len, kv_heads=kv_heads, causal=causal, backend="flex")
        built = workload.build("cpu")
        assert built.check is not None
        assert built.check() is None
    assert workload.launch() == "compile"


def upper_left(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def unmasked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def heads_in_turn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    share = q.shape[1] // k.shape[1]
    return by_hand(q, k.repeat(1, share, 1, 1), v.repeat(1, share, 1, 1), causal=True)


def last_key_left_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return by_hand(q, k[..., :-1, :], v[..., :-1, :], causal=True)


def unscaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=True)


@pytest.mark.parametrize("broken", [upper_left, unmasked, heads_in_turn, last_key_left_out, unscaled])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_broken_kernel_is_noticed(broken: Callable[..., torch.Tensor], dtype: str) -> None:
    tensors = tensors_of(attention(q_len=300, kv_len=512, kv_heads=2, dtype=dtype))
    formula = Formula(tensors=tensors, dtype=dtype, ahead=212)
    fault = formula.fault(broken(tensors.query, tensors.key, tensors.value))
    assert fault is not None
    assert re.fullmatch(
        r"the output is not the formula's: of sequence 1, key head 1, "
        r"rows \d+ to \d+ are off by [\d.e+]+, their norm is [\d.e+]+",
        fault,
    )


@pytest.mark.parametrize(("place", "name"), [(0, "output"), *enumerate(("gradient of q", "gradient of k"), 1)])
def test_a_fault_in_late_rows_of_one_result_is_noticed(place: int, name: str) -> None:
    workload = attention(batch=1, heads=2, q_len=1500, dtype="bf16", backward=True)
    results = [result.detach().clone() for result in workload.build("cpu").step()]
    formula = Formula(tensors=tensors_of(workload), dtype="bf16", ahead=0)
    assert formula.fault(results) is None
    results[place][0, 0, 1400:] *= 0.8
    assert (formula.fault(results) or "").startswith(
        f"the {name} is not the formula's: of sequence 0, key head 0, rows "
    )
    results[place][0, 0, 1400:] = math.nan
    assert "off by nan" in (formula.fault(results) or "")


def test_much_work_is_checked_in_part() -> None:
    def groups(**shape: Any) -> list[tuple[int, int]]:
        empty = {name: torch.empty(shape[name], device="meta") for name in ("query", "key")}
        tensors = AttentionTensors(query=empty["query"], key=empty["key"], value=empty["key"], gradient=None)
        return list(Formula(tensors=tensors, dtype="fp32", ahead=0).groups())

    assert groups(query=(2, 4, 64, 16), key=(2, 2, 64, 16)) == [(1, 1), (1, 0), (0, 1), (0, 0)]
    # 12 heads of 2^20 scores each: 8 of them would be affordable, so that every second one is looked at.
    assert groups(query=(1, 12, 1024, 64), key=(1, 12, 1024, 64)) == [(0, head) for head in (11, 9, 7, 5, 3, 1)]
    assert groups(query=(1, 32, 16384, 128), key=(1, 8, 16384, 128)) == [(0, 7)]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_predicted_memory_is_what_a_step_holds(backend: str, dtype: str, backward: bool) -> None:
    workload = Attention(heads=8, q_len=512, head_dim=64, backend=backend, dtype=dtype, backward=backward)
    built = workload.build("cpu")
    assert built.resident_bytes is not None
    peak = peak_memory_bytes(built.step, "cpu")
    assert peak is not None
    assert workload.memory_bytes() == pytest.approx(peak + built.resident_bytes(), rel=0.15)
    assert sum(workload.memory_parts().values()) == workload.memory_bytes()


def test_scores_are_what_the_math_backend_needs() -> None:
    long = {"heads": 32, "kv_heads": 8, "q_len": 8192, "head_dim": 128, "dtype": "bf16"}
    flash, formula = (Attention(backend=backend, **long) for backend in ("flash", "math"))  # type: ignore[arg-type]
    assert (flash.memory_bytes() or 0) < 0.2 * 1024**3
    # Scores and softmax in fp32 and a byte mask: 9 bytes for each of 32 x 8192^2.
    assert (formula.memory_bytes() or 0) > 9 * 32 * 8192**2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"batch": 0}, "Attention: batch=0 must be a whole number of at least 1"),
        ({"heads": None}, "Attention: heads=None must be"),
        ({"q_len": 1.0}, "Attention: q_len=1.0 must be"),
        ({"kv_len": 0}, "Attention: kv_len=0 must be"),
        ({"kv_heads": True}, "Attention: kv_heads=True must be"),
        ({"kv_heads": 3}, "Attention: heads=4 must be a multiple of kv_heads=3"),
        ({"kv_len": 39}, "Attention: q_len=40 must not exceed kv_len=39 with causal=True"),
        ({"causal": None}, "Attention: causal=None must be True or False"),
        ({"backward": 1}, "Attention: backward=1 must be True or False"),
        ({"backend": "xformers"}, "Attention: backend='xformers' must be one of auto, flash, efficient, math, cudnn"),
        ({"dtype": "int8"}, "Attention: dtype='int8' must be one of fp64, fp32, tf32, bf16, fp16"),
        ({"dtype": "tf32", "backend": "flash"}, "Attention: backend='flash' does not compute in tf32; use 'math' or"),
        ({"dtype": "fp64", "backend": "flex"}, "Attention: backend='flex' does not compute in fp64; use 'math'"),
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CaseError, match=re.escape(complaint)):
        attention(**changes)


@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    [
        ({"backend": "flash"}, CPU, None),
        ({"backend": "math", "kv_heads": 2, "dtype": "fp64"}, H100, None),
        ({"backend": "math", "dtype": "tf32"}, CPU, "no TF32"),
        ({"dtype": "bf16"}, T4, "bf16 needs compute capability 8.0"),
        ({"backend": "efficient"}, CPU, "no memory-efficient attention for a CPU"),
        ({"backend": "efficient", "kv_heads": 2}, H100, "takes no grouped heads"),
        ({"backend": "efficient", "dtype": "fp64"}, H100, "takes no fp64"),
        ({"backend": "efficient", "head_dim": 12, "dtype": "bf16"}, H100, "a multiple of 8, not 12"),
        ({"backend": "efficient", "head_dim": 12}, MI300X, None),
        ({"backend": "cudnn"}, CPU, "no cuDNN on a CPU"),
        ({"backend": "cudnn", "dtype": "bf16"}, MI300X, "no cuDNN on rocm"),
        ({"backend": "cudnn", "dtype": "bf16", "kv_heads": 2}, H100, None),
        ({"backend": "cudnn"}, H100, "torch's cudnn kernel takes bf16 and fp16 on a GPU, not fp32"),
        ({"backend": "cudnn", "dtype": "bf16", "head_dim": 256}, H100, "heads of at most 128, not 256"),
        ({"backend": "cudnn", "dtype": "bf16", "head_dim": 12}, H100, "a multiple of 8, not 12"),
        ({"backend": "cudnn", "dtype": "bf16", "q_len": 1}, H100, "no single key"),
        ({"backend": "flash", "dtype": "fp16", "kv_heads": 2}, H100, None),
        ({"backend": "flash", "dtype": "fp16"}, MI300X, None),
        ({"backend": "flash"}, H100, "torch's flash kernel takes bf16 and fp16 on a GPU, not fp32"),
        ({"backend": "flash", "dtype": "fp16"}, T4, "needs compute capability 8.0, this device's is 7.5"),
        ({"backend": "flash", "dtype": "fp16", "head_dim": 320}, H100, "heads of at most 256 on a GPU, not 320"),
        ({"backend": "flex", "backward": True}, CPU, "FlexAttention has no backward pass on a CPU"),
        ({"backend": "flex", "backward": True, "dtype": "tf32"}, H100, None),
        ({"backend": "flex", "head_dim": 8}, H100, "heads of at least 16 on a GPU, not 8"),
    ],
)
def test_it_knows_where_it_cannot_run(changes: dict[str, Any], target: Target, reason: str | None) -> None:
    said = attention(**changes).unsupported(target)
    assert said is None if reason is None else reason in (said or "")


def test_flex_on_a_cpu_needs_x86_and_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    flex = attention(backend="flex")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert flex.unsupported(CPU) is None
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "C++ compiler" in (flex.unsupported(CPU) or "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "needs an x86 with AVX2" in (flex.unsupported(CPU) or "")


def test_a_forced_backend_runs_alone() -> None:
    with pytest.raises(RuntimeError, match="No viable backend"):
        attention(backend="cudnn").build("cpu").step()


def test_a_cpu_is_held_against_a_matmul() -> None:
    assert (attention().metric, attention().cpu_control(), attention().launch()) == (None, "matmul", None)
