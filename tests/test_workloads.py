"""The built-in workloads: declared work by hand, results on a CPU, what is refused, and what torch's counter says."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import perfsuite
from perfsuite import (
    Add,
    Copy,
    DeviceToHost,
    Dropout,
    Gelu,
    Gemm,
    HostToDevice,
    Launch,
    LayerNorm,
    Reduction,
    ResidualAdd,
    RMSNorm,
    Scale,
    SiluMul,
    Softmax,
    Triad,
    Work,
    Workload,
)
from perfsuite.errors import CaseError
from perfsuite.workloads.base import Target
from perfsuite.workloads.counting import count_flops

ROOT = Path(__file__).resolve().parent.parent
CPU = Target(backend="cpu", sku="cpu-test")

SMALL: list[Workload] = [
    *(Gemm(m=17, n=24, k=40, dtype=dtype) for dtype in ("fp64", "fp32", "tf32", "bf16", "fp16", "int8")),
    Gemm(m=3, n=5, k=7, transpose_a=True),
    Gemm(m=3, n=5, k=7, transpose_b=True, dtype="bf16"),
    Gemm(m=3, n=5, k=7, batch=2, transpose_a=True, transpose_b=True),
    *(loop(nbytes=800, dtype=dtype) for loop in (Copy, Scale, Add, Triad) for dtype in ("fp64", "fp32", "bf16")),
    *(norm(rows=4, cols=16, fused=fused) for norm in (LayerNorm, RMSNorm, Softmax, Gelu) for fused in (True, False)),
    Gelu(rows=4, cols=16, approximate="tanh", dtype="bf16"),
    SiluMul(rows=4, cols=16, dtype="fp16"),
    Dropout(rows=4, cols=16),
    ResidualAdd(rows=4, cols=16),
    *(Reduction(op=op, rows=4, cols=6, dim=dim) for op in ("sum", "mean", "max", "norm") for dim in (0, 1, None)),
    *(Reduction(op="argmax", rows=4, cols=6, dim=dim) for dim in (0, 1, None)),
    *(Launch(op=op, chain=3) for op in ("add", "linear", "allocate")),
]


def named(workload: Workload) -> str:
    return "-".join(str(value) for value in workload.describe().values())


def run(workload: Workload) -> Any:
    """One step's result on a CPU, beside none of its neighbours' random state."""
    built = workload.build("cpu")
    assert callable(built)
    return built()


def nbytes_of(workload: Workload) -> int:
    nbytes = workload.work().nbytes
    assert nbytes is not None
    return nbytes


@pytest.mark.parametrize("workload", SMALL, ids=named)
def test_every_workload_yields_finished_numbers(workload: Workload) -> None:
    result = run(workload)
    if isinstance(result, torch.Tensor):
        assert not torch.isnan(result).any()
        if not result.is_floating_point():
            assert (result != torch.iinfo(result.dtype).min).all()


@pytest.mark.parametrize("workload", SMALL, ids=named)
def test_declared_flops_are_what_the_counter_finds(workload: Workload) -> None:
    step = workload.build("cpu")
    assert callable(step)
    if isinstance(workload, Launch) and workload.op == "allocate":
        return  # nothing that computes: the counter refuses, as it should
    counted = count_flops(step)
    declared = workload.work()
    # STREAM counts its element-wise operations, perfsuite's convention and torch's counter do not.
    assert counted == (0 if declared.flop_convention == "declared" else declared.flops)


@pytest.mark.parametrize("workload", [w for w in SMALL if isinstance(w, Gemm) and w.dtype != "int8"], ids=named)
def test_gemm_flops_are_those_of_torchs_own_counter(workload: Gemm) -> None:
    step = workload.build("cpu")
    with FlopCounterMode(display=False) as counter:
        step()
    assert counter.get_total_flops() == workload.work().flops


@pytest.mark.parametrize("workload", SMALL, ids=named)
def test_memory_covers_inputs_and_outputs(workload: Workload) -> None:
    predicted = workload.memory_bytes()
    assert predicted is not None
    assert predicted >= nbytes_of(workload)


@pytest.mark.parametrize("workload", SMALL, ids=named)
def test_description_is_plain_and_names_its_kind(workload: Workload) -> None:
    description = workload.describe()
    assert description["kind"] == workload.kind
    assert description["fill"] == "random"
    assert {field.name for field in dataclasses.fields(workload)} <= description.keys()


@pytest.mark.parametrize("workload", SMALL, ids=named)
def test_two_builds_do_the_same(workload: Workload) -> None:
    if isinstance(workload, Dropout):
        return  # its numbers are new in every step
    assert torch.equal(torch.as_tensor(run(workload)), torch.as_tensor(run(workload)))


def test_gemm_counts_each_input_and_output_once() -> None:
    gemm = Gemm(m=8192, n=6144, k=4096, dtype="bf16")
    assert gemm.work() == Work(flops=412_316_860_416, nbytes=2 * (8192 * 4096 + 4096 * 6144 + 8192 * 6144))
    assert nbytes_of(Gemm(m=32, n=16, k=8, batch=3)) == 3 * 4 * (32 * 8 + 8 * 16 + 32 * 16)


def test_eight_bit_products_are_wider_than_their_inputs() -> None:
    assert nbytes_of(Gemm(m=32, n=16, k=8, dtype="int8")) == 32 * 8 + 8 * 16 + 4 * 32 * 16
    assert nbytes_of(Gemm(m=32, n=16, k=16, dtype="fp8")) == 32 * 16 + 16 * 16 + 2 * 32 * 16 + 2 * 4


def test_layouts_multiply_the_same_shapes() -> None:
    for transpose_a in (True, False):
        for transpose_b in (True, False):
            gemm = Gemm(m=3, n=5, k=7, batch=2, transpose_a=transpose_a, transpose_b=transpose_b)
            assert run(gemm).shape == (2, 3, 5)
            assert gemm.work() == Gemm(m=3, n=5, k=7, batch=2).work()


def test_int8_product_is_exact() -> None:
    product = run(Gemm(m=17, n=8, k=16, dtype="int8"))
    assert product.dtype == torch.int32
    assert product.abs().max() <= 16 * 128 * 128


def test_fp8_runs_where_torch_emulates_it() -> None:
    product = run(Gemm(m=16, n=16, k=16, dtype="fp8"))
    assert product.dtype == torch.bfloat16
    assert product.float().std() > 1


@pytest.mark.parametrize(("loop", "arrays", "flops"), [(Copy, 2, 0), (Scale, 2, 100), (Add, 3, 100), (Triad, 3, 200)])
def test_stream_counts_as_stream_does(loop: Any, arrays: int, flops: int) -> None:
    work = loop(nbytes=800, dtype="fp64").work()
    assert work == Work(flops=flops, nbytes=arrays * 800, flop_convention="declared")


def test_fused_and_unfused_share_bytes_and_result() -> None:
    for form in (LayerNorm, RMSNorm, Softmax, Gelu):
        for dtype in ("fp32", "bf16"):
            fused, unfused = (form(rows=8, cols=32, dtype=dtype, fused=fused) for fused in (True, False))
            assert fused.work() == unfused.work()
            torch.testing.assert_close(run(fused), run(unfused))
    exact, rough = (run(Gelu(rows=8, cols=32, approximate="tanh", fused=fused)) for fused in (True, False))
    torch.testing.assert_close(exact, rough)


def test_pointwise_bytes_by_hand() -> None:
    assert nbytes_of(LayerNorm(rows=10, cols=4, dtype="bf16")) == 2 * (2 * 40 + 2 * 4)
    assert nbytes_of(RMSNorm(rows=10, cols=4)) == 4 * (2 * 40 + 4)
    assert nbytes_of(Softmax(rows=10, cols=4)) == 4 * 2 * 40
    assert nbytes_of(SiluMul(rows=10, cols=4)) == 4 * 3 * 40
    assert Dropout(rows=10, cols=4).work().flops == 0


def test_formulas_hold_their_intermediates() -> None:
    elements = 10 * 4
    assert LayerNorm(rows=10, cols=4).memory_bytes() == 4 * (2 * elements + 2 * 4)
    assert LayerNorm(rows=10, cols=4, fused=False).memory_bytes() == 4 * (4 * elements + 2 * 4)
    # bf16 is first copied to fp32: one more tensor of four bytes an element.
    assert Softmax(rows=10, cols=4, dtype="bf16", fused=False).memory_bytes() == 2 * elements + 4 * 4 * elements
    assert SiluMul(rows=10, cols=4).memory_bytes() == 4 * 4 * elements


def test_dropout_zeroes_and_scales() -> None:
    result = run(Dropout(rows=100, cols=100, p=0.25))
    assert (result == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(("dim", "results"), [(0, 6), (1, 4), (None, 1)])
def test_reduction_reads_once_and_writes_what_is_left(dim: int | None, results: int) -> None:
    assert nbytes_of(Reduction(op="sum", rows=4, cols=6, dim=dim)) == 4 * (24 + results)
    assert nbytes_of(Reduction(op="argmax", rows=4, cols=6, dim=dim)) == 4 * 24 + 8 * results
    assert run(Reduction(op="max", rows=4, cols=6, dim=dim)).numel() == results


def test_chain_of_additions_adds_up() -> None:
    once, hundred = run(Launch(op="add", chain=1)), run(Launch(op="add", chain=100))
    torch.testing.assert_close(hundred - once, torch.full((1,), 99.0))


def test_chain_of_layers_keeps_its_size() -> None:
    assert 0.01 < run(Launch(op="linear", chain=200)).abs().mean().item() < 100


@pytest.mark.parametrize(
    ("declare", "complaint"),
    [
        (lambda: Gemm(m=0, n=1, k=1), "Gemm: m=0 must be a whole number of at least 1"),
        (lambda: Gemm(m=1, n=True, k=1), "Gemm: n=True must be"),
        (lambda: Gemm(m=1, n=1, k=2.0), "Gemm: k=2.0 must be"),  # type: ignore[arg-type]
        (lambda: Gemm(m=1, n=1, k=1, batch=-1), "Gemm: batch=-1 must be"),
        (lambda: Gemm(m=1, n=1, k=1, transpose_a=1), "Gemm: transpose_a=1 must be True or False"),  # type: ignore[arg-type]
        (lambda: Gemm(m=1, n=1, k=1, dtype="fp4"), "dtype='fp4' is not known"),
        (lambda: Gemm(m=17, n=12, k=8, dtype="int8"), "Gemm: n=12 must be a multiple of 8 with dtype='int8'"),
        (lambda: Gemm(m=17, n=8, k=12, dtype="int8"), "Gemm: k=12 must be a multiple of 8 with dtype='int8'"),
        (lambda: Gemm(m=16, n=8, k=8, dtype="int8"), "Gemm: m=16 must be more than 16"),
        (lambda: Gemm(m=1, n=24, k=16, dtype="fp8"), "Gemm: n=24 must be a multiple of 16 with dtype='fp8'"),
        (lambda: Gemm(m=1, n=16, k=16, dtype="fp8", batch=2), "Gemm: batch=2 must be 1 with dtype='fp8'"),
        (lambda: Gemm(m=1, n=16, k=16, dtype="fp8", transpose_b=True), "Gemm: transpose_b=True does not go with"),
        (lambda: Gemm(m=17, n=8, k=8, dtype="int8", transpose_a=True), "Gemm: transpose_a=True does not go with"),
        (lambda: Copy(nbytes=6), "Copy: nbytes=6 must be whole elements of fp32"),
        (lambda: Triad(nbytes=0), "Triad: nbytes=0 must be"),
        (lambda: Add(nbytes=8, dtype="fp8"), "Add: dtype='fp8' must be one of fp64, fp32, bf16, fp16"),
        (lambda: HostToDevice(nbytes=-4), "HostToDevice: nbytes=-4 must be"),
        (lambda: DeviceToHost(nbytes=4, pinned="yes"), "DeviceToHost: pinned='yes' must be"),  # type: ignore[arg-type]
        (lambda: LayerNorm(rows=1, cols=1, dtype="tf32"), "LayerNorm: dtype='tf32' must be one of"),
        (lambda: RMSNorm(rows=1, cols=0), "RMSNorm: cols=0 must be"),
        (lambda: Softmax(rows=1, cols=1, fused=None), "Softmax: fused=None must be"),  # type: ignore[arg-type]
        (lambda: Gelu(rows=1, cols=1, approximate="erf"), "Gelu: approximate='erf' must be one of none, tanh"),
        (lambda: Dropout(rows=1, cols=1, p=1.0), "Dropout: p=1.0 must be a number between 0 and 1"),
        (lambda: Dropout(rows=1, cols=1, p=float("nan")), "Dropout: p=nan must be"),
        (lambda: Reduction(op="product", rows=1, cols=1), "Reduction: op='product' must be one of sum, mean"),
        (lambda: Reduction(op="sum", rows=1, cols=1, dim=2), "Reduction: dim=2 must be 0, 1 or None"),
        (lambda: Launch(op="mul"), "Launch: op='mul' must be one of add, linear, allocate"),
        (lambda: Launch(chain=0), "Launch: chain=0 must be"),
    ],
)
def test_a_wrong_argument_is_named(declare: Any, complaint: str) -> None:
    with pytest.raises(CaseError, match=re.escape(complaint)):
        declare()


@pytest.mark.parametrize(
    ("dtype", "target", "reason"),
    [
        ("tf32", CPU, "no TF32"),
        ("tf32", Target(backend="xpu", sku="x"), "no TF32"),
        ("tf32", Target(backend="rocm", sku="x"), None),
        ("tf32", Target(backend="cuda", sku="x", compute_capability="7.5"), "tf32 needs compute capability 8.0"),
        ("tf32", Target(backend="cuda", sku="x", compute_capability="8.0"), None),
        ("bf16", Target(backend="cuda", sku="x", compute_capability="7.0"), "bf16 needs compute capability 8.0"),
        ("bf16", CPU, None),
        ("fp8", CPU, "torch has only a slow reference loop for fp8 on a CPU"),
        ("fp8", Target(backend="cuda", sku="x", compute_capability="8.6"), "fp8 needs compute capability 8.9"),
        ("fp8", Target(backend="cuda", sku="x", compute_capability="10.0"), None),
        ("fp8", Target(backend="rocm", sku="x"), "fp8 GEMMs are declared for CUDA devices only"),
        ("int8", Target(backend="cuda", sku="x", compute_capability="7.0"), "int8 needs compute capability 7.5"),
        ("int8", Target(backend="cuda", sku="x"), "this device's is unknown"),
        ("int8", CPU, None),
        ("fp64", CPU, None),
    ],
)
def test_gemm_knows_where_it_cannot_run(dtype: str, target: Target, reason: str | None) -> None:
    said = Gemm(m=32, n=16, k=16, dtype=dtype).unsupported(target)
    if reason is None:
        assert said is None
    else:
        assert said is not None
        assert reason in said


@pytest.mark.parametrize("direction", [HostToDevice, DeviceToHost])
def test_transfers_need_a_gpu(direction: type[HostToDevice] | type[DeviceToHost]) -> None:
    transfer = direction(nbytes=1024)
    assert transfer.unsupported(CPU) == "needs a GPU"
    assert transfer.unsupported(Target(backend="cuda", sku="x", compute_capability="9.0")) is None
    assert transfer.work() == Work(flops=0, nbytes=1024)


@pytest.mark.parametrize("direction", [HostToDevice, DeviceToHost])
def test_pageable_transfers_move_their_bytes(direction: type[HostToDevice] | type[DeviceToHost]) -> None:
    assert run(direction(nbytes=1024, pinned=False)).unique().numel() > 200


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize(
    "workload",
    [*SMALL, Gemm(m=32, n=16, k=16, dtype="fp8"), HostToDevice(nbytes=64), DeviceToHost(nbytes=64)],
    ids=named,
)
def test_every_workload_runs_on_a_gpu(workload: Workload) -> None:
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    backend = "rocm" if torch.version.hip else "cuda"
    if reason := workload.unsupported(Target(backend=backend, sku="here", compute_capability=capability)):
        pytest.skip(reason)
    built = workload.build("cuda")
    assert callable(built)
    result = built()
    torch.cuda.synchronize()
    assert not isinstance(result, torch.Tensor) or not torch.isnan(result).any()


def test_public_names_are_these() -> None:
    assert sorted(perfsuite.__all__) == dir(perfsuite)
    assert set(perfsuite.__all__) >= {"Gemm", "Kernel", "Work", "Workload", "__version__"}
    for name in perfsuite.__all__:
        assert getattr(perfsuite, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Gem'"):
        perfsuite.Gem  # type: ignore[attr-defined] # noqa: B018


def test_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert perfsuite.__version__ == project["version"]


def test_declaring_work_does_not_load_torch() -> None:
    code = (
        "import sys; from perfsuite import Gemm, Kernel, LayerNorm; gemm = Gemm(m=8, n=8, k=8); gemm.work();"
        "gemm.memory_bytes(); gemm.describe(); Kernel(print).work(); LayerNorm(rows=1, cols=1).work();"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"
