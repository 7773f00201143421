"""Controls: which one a case gets, what it does, what it says it does; and the ceilings that are measured."""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from perfsuite.measure import ceiling
from perfsuite.measure.clock import Block, FakeClock, HostClock, Step
from perfsuite.measure.control import (
    LARGEST_GEMM,
    SMALLEST_GEMM,
    Control,
    chain_control,
    control_for,
    gemm_control,
    memmove_control,
    read_control,
)
from perfsuite.measure.measurement import CeilingSample
from perfsuite.workloads.pointwise import Gelu, LayerNorm, ResidualAdd, RMSNorm, SiluMul, Softmax
from perfsuite.workloads.reduction import Reduction


@pytest.mark.parametrize(
    ("flops", "size"),
    [
        (0, 64),
        (1, 64),
        (2 * 64**3, 64),
        (2 * 127**3, 64),
        (2 * 128**3, 128),
        (2 * 200**3, 128),
        (2 * 256**3, 256),
        (2 * 512**3, 512),
        (2 * 1023**3, 512),
        (2 * 1024**3, 1024),
        (2 * 8192**3, 1024),
    ],
)
def test_a_gemm_is_the_largest_power_of_two_within_the_cases_flops(flops: int, size: int) -> None:
    """Never more work than the case's own, from 64 to 1024: 2 n^3 FLOP a call."""
    assert (SMALLEST_GEMM, LARGEST_GEMM) == (64, 1024)
    control = gemm_control(flops, "float32")
    assert control.name == f"numpy.matmul[{size},float32]"
    assert (control.work, control.unit) == (2 * size**3, "FLOP")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_gemm_multiplies_what_it_says(dtype: str) -> None:
    result = gemm_control(1, dtype).step()
    assert (result.shape, result.dtype) == ((64, 64), np.dtype(dtype))
    # A product of random matrices: neither zeros nor one of its inputs.
    assert np.linalg.matrix_rank(result) == 64
    assert 6 < float(result.std()) < 10  # sqrt(64) for normal numbers


def test_a_gemm_writes_into_the_same_output_every_time() -> None:
    """A fresh output in every call would fault its pages in, and time the allocator."""
    control = gemm_control(1, "float32")
    first = control.step()
    assert control.step() is first


@pytest.mark.parametrize(("nbytes", "half"), [(1, 1), (2, 1), (1001, 500), (4096, 2048), (10**6, 500_000)])
def test_a_memmove_reads_and_writes_the_cases_bytes_in_all(nbytes: int, half: int) -> None:
    control = memmove_control(nbytes)
    assert control.name == f"libc.memmove[{half}]"
    assert (control.work, control.unit) == (2 * half, "B")


def test_a_memmove_really_moves_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[tuple[Any, Any, int]] = []

    def memmove(target: Any, source: Any, size: Any, real: Any = ctypes.memmove) -> None:
        moves.append((target, source, size.value))
        real(target, source, size)

    monkeypatch.setattr(ctypes, "memmove", memmove)
    control = memmove_control(2 * 4096)
    control.step()
    ((target, source, size),) = moves
    random_bytes = ctypes.string_at(source, size)
    assert (size, target.value != source.value) == (4096, True)
    assert len(set(random_bytes)) > 100
    assert ctypes.string_at(target, size) == random_bytes
    ctypes.memset(source, 7, size)
    control.step()
    assert ctypes.string_at(target, size) == b"\7" * size


def test_a_chain_is_ten_calls() -> None:
    control = chain_control()
    assert (control.name, control.work, control.unit) == ("numpy.add[16]x10", 10, "calls")


def test_a_chain_calls_numpy_ten_times(monkeypatch: pytest.MonkeyPatch) -> None:
    control, calls = chain_control(), []
    monkeypatch.setattr(np, "add", lambda *args, **named: calls.append(args))
    control.step()
    assert len(calls) == 10


@pytest.mark.parametrize(
    ("metric", "nbytes", "dtype", "name"),
    [
        ("mfu", 4096, "fp32", "numpy.matmul[64,float32]"),
        ("mfu", None, "bf16", "numpy.matmul[64,float32]"),
        ("mfu", 4096, "fp64", "numpy.matmul[64,float64]"),
        ("mbu", 4096, "fp32", "libc.memmove[2048]"),
        ("mbu", 4096, "fp64", "libc.memmove[2048]"),
        ("mbu", None, "fp32", "numpy.add[16]x10"),
        ("latency_us", 4096, "fp32", "numpy.add[16]x10"),
    ],
)
def test_the_bound_of_a_case_chooses_its_control(metric: str, nbytes: int | None, dtype: str, name: str) -> None:
    assert control_for(metric=metric, flops=1, nbytes=nbytes, dtype=dtype).name == name


@pytest.mark.parametrize("control", [gemm_control(1, "float32"), chain_control()], ids=lambda control: control.name)
def test_numpys_controls_name_its_version(control: Control) -> None:
    assert control.version == np.__version__


@pytest.mark.parametrize(
    ("libc", "system", "version"),
    [(("glibc", "2.36"), "Linux", "glibc-2.36"), (("musl", ""), "Linux", "musl"), (("", ""), "Darwin", "darwin")],
)
def test_a_memmove_names_its_libc(
    monkeypatch: pytest.MonkeyPatch, libc: tuple[str, str], system: str, version: str
) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    monkeypatch.setattr(platform, "system", lambda: system)
    assert memmove_control(64).version == version


# Measured ceilings


def rate(rate_per_s: float, detail: str = "") -> CeilingSample:
    return CeilingSample(key="compute.fp32", rate_per_s=rate_per_s, unit="FLOP/s", detail=detail)


@pytest.mark.parametrize(
    ("one", "other", "best"), [(1.0, 2.0, 2.0), (2.0, 1.0, 2.0), (math.nan, 1.0, 1.0), (1.0, math.nan, 1.0)]
)
def test_the_higher_ceiling_wins_and_nan_never_does(one: float, other: float, best: float) -> None:
    assert ceiling.better(rate(one), rate(other)).rate_per_s == best


def test_a_controls_rate_as_a_ceiling_names_the_library() -> None:
    control = Control(name="libc.memmove[8]", version="glibc-2.36", work=16.0, unit="B", step=lambda: None)
    assert ceiling.from_control(control, 5e9, key="memory") == CeilingSample(
        key="memory", rate_per_s=5e9, unit="B/s", detail="libc.memmove[8] glibc-2.36"
    )


def test_memory_ceilings_of_two_sizes_have_two_keys() -> None:
    assert ceiling.memory_key(64) != ceiling.memory_key(128)


class Scripted(FakeClock):
    """Takes the next of ``seconds`` for every block, whatever the step."""

    def __init__(self, seconds: Iterable[float]) -> None:
        super().__init__()
        self.seconds = iter(seconds)
        self.blocks = 0

    def time(self, step: Step, iterations: int) -> Block:
        step()
        self.blocks += 1
        return Block(seconds=next(self.seconds))


def test_the_compute_probe_keeps_the_best_of_its_sizes() -> None:
    """Five blocks a size; the best of 128 is 1 us (4.19 TFLOP/s), of 256 4 us (8.39), of 512 25 ms: the last one."""
    clock = Scripted([*[1e-6] * 5, 9e-5, 4e-6, 9e-5, 9e-5, 9e-5, *[0.025] * 5])
    best = ceiling.probe_compute("fp32", "cpu", clock)
    assert clock.blocks == 15
    assert (best.key, best.unit, best.detail) == ("compute.fp32", "FLOP/s", "torch.matmul[256,fp32]")
    assert best.rate_per_s == pytest.approx(2 * 256**3 / 4e-6)


def test_the_memory_probe_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "PROBE_BYTES", 4096)
    best = ceiling.probe_memory("cpu", Scripted([3e-6, 2e-6, 3e-6, 3e-6, 3e-6]))
    assert (best.key, best.unit) == ("memory", "B/s")
    assert best.rate_per_s == pytest.approx(2 * 4096 / 2e-6)


def test_the_read_probe_counts_bytes_read_alone() -> None:
    best = ceiling.probe_control(read_control(4096), key="memory.c", clock=Scripted([3e-6, 2e-6, 3e-6, 3e-6, 3e-6]))
    assert (best.key, best.unit) == ("memory.c", "B/s")
    assert best.rate_per_s == pytest.approx(4096 / 2e-6)
    assert best.detail == f"numpy.dot[1024] {np.__version__}"


def test_int8_has_a_ceiling_in_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "PROBE_SIZES", (32,))
    assert ceiling.probe_compute("int8", "cpu", HostClock()).unit == "OP/s"


@pytest.mark.parametrize(
    ("kind", "metric", "name"),
    [
        (None, "mbu", "libc.memmove[2048]"),
        ("matmul", "mbu", "numpy.matmul[256,float32]"),
        ("memmove", "mfu", "libc.memmove[2048]"),
        ("calls", "mbu", "numpy.add[16]x10"),
    ],
)
def test_a_workload_may_ask_for_its_control(kind: str | None, metric: str, name: str) -> None:
    assert control_for(metric=metric, flops=0, nbytes=4096, dtype="bf16", kind=kind).name == name


def test_pointwise_work_is_held_against_compute_and_streams_against_memmove() -> None:
    pointwise = (LayerNorm, RMSNorm, Softmax, Gelu, SiluMul)
    assert {workload(rows=8, cols=8).cpu_control() for workload in pointwise} == {"matmul"}
    assert ResidualAdd(rows=8, cols=8).cpu_control() == "memmove"
    assert [Reduction(op=op, rows=8, cols=8).cpu_control() for op in ("sum", "argmax")] == ["memmove", "matmul"]
