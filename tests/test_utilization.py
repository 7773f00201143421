"""Utilization: hand-computed MFU, MBU, bus bandwidth and roofline."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.errors import CaseError
from perfsuite.hardware import Hardware, load
from perfsuite.utilization import (
    COLLECTIVE_OPS,
    Ceiling,
    Part,
    TimeS,
    Utilization,
    algbw_bytes_per_s,
    arithmetic_intensity,
    busbw_bytes_per_s,
    busbw_factor,
    busbw_utilization,
    collective_utilization,
    compute_ceiling,
    compute_utilization,
    ideal_time_s,
    link_ceiling,
    mbu,
    memory_ceiling,
    memory_utilization,
    mfu,
    mixed_mfu,
    roofline_bound,
    roofline_time_s,
)

TIME = TimeS(median=2.0, low=1.6, high=2.5)


def row(sku: str) -> Hardware:
    found = load().by_sku(sku)
    assert found is not None
    return found


def test_the_impossible_training_step() -> None:
    """7e9 parameters, 32 x 2048 tokens, 8 GPUs of 312 TFLOP/s, 0.5 s: 2.75e15 FLOPs, 220 %, at least 1.10 s."""
    flops = 6 * 7e9 * 2048 * 32
    assert flops == pytest.approx(2.75e15, rel=1e-3)
    assert mfu(flops=flops, time_s=0.5, peak_flops_per_s=8 * 312e12) == pytest.approx(2.20556, rel=1e-5)
    assert ideal_time_s([Part(flops=flops, peak_flops_per_s=8 * 312e12)]) == pytest.approx(1.10278, rel=1e-5)
    assert mfu(flops=flops, time_s=1.5, peak_flops_per_s=8 * 312e12) == pytest.approx(0.7352, rel=1e-4)


def test_an_unlisted_gpu_must_not_be_held_against_an_a100() -> None:
    """329.8 TFLOP/s are 105.7 % of an A100 and 14.7 % of the B300 that made them."""
    b300 = load().by_device_name("NVIDIA B300 SXM6 AC")
    assert b300 is not None
    peak = b300.flops_per_s("bf16")
    assert peak is not None
    assert mfu(flops=329.8e12, time_s=1, peak_flops_per_s=312e12) == pytest.approx(1.057, abs=1e-3)
    assert mfu(flops=329.8e12, time_s=1, peak_flops_per_s=peak) == pytest.approx(0.1466, abs=1e-4)


def test_mixed_types_add_their_ideal_times() -> None:
    """3.12e14 in bf16 (1 s) and 1.95e13 in fp32 (1 s) on an A100 in 4 s: half of the time was needed."""
    parts = [Part(flops=312e12, peak_flops_per_s=312e12), Part(flops=19.5e12, peak_flops_per_s=19.5e12)]
    assert mixed_mfu(parts, time_s=4) == 0.5
    assert mixed_mfu([], time_s=4) == 0


def test_mbu() -> None:
    """A LayerNorm of 16384x2048 fp32 reads and writes 268 MB; at 1555 GB/s in 0.2 ms: 86.3 %."""
    nbytes = 2 * 16384 * 2048 * 4
    assert mbu(nbytes=nbytes, time_s=0.2e-3, bytes_per_s=1555e9) == pytest.approx(0.8632, abs=1e-4)


# all_reduce 2(n-1)/n; reduce_scatter, all_gather, all_to_all (n-1)/n; broadcast, reduce, send/recv 1.
@pytest.mark.parametrize(
    ("operation", "factors"),
    [
        ("all_reduce", (0, 1, 4 / 3, 1.75)),
        ("reduce_scatter", (0, 1 / 2, 2 / 3, 0.875)),
        ("all_gather", (0, 1 / 2, 2 / 3, 0.875)),
        ("all_to_all", (0, 1 / 2, 2 / 3, 0.875)),
        ("broadcast", (0, 1, 1, 1)),
        ("reduce", (0, 1, 1, 1)),
        ("send_recv", (0, 1, 1, 1)),
    ],
)
def test_bus_bandwidth_factors(operation: str, factors: tuple[float, ...]) -> None:
    assert [busbw_factor(operation, ranks) for ranks in (1, 2, 3, 8)] == pytest.approx(factors)


def test_bus_bandwidth_of_an_all_reduce() -> None:
    """1 GB on 8 ranks in 5 ms: 200 GB/s of algbw, 350 of busbw, 77.8 % of a 450 GB/s link."""
    assert algbw_bytes_per_s(nbytes=1e9, time_s=5e-3) == 200e9
    assert busbw_bytes_per_s("all_reduce", nbytes=1e9, time_s=5e-3, ranks=8) == 350e9
    found = busbw_utilization("all_reduce", nbytes=1e9, time_s=5e-3, ranks=8, link_bytes_per_s=450e9)
    assert found == pytest.approx(0.77778, rel=1e-4)


@pytest.mark.parametrize("operation", sorted(COLLECTIVE_OPS))
def test_one_rank_has_no_bus_and_no_utilization(operation: str) -> None:
    assert busbw_bytes_per_s(operation, nbytes=1e9, time_s=1e-3, ranks=1) == 0
    assert busbw_utilization(operation, nbytes=1e9, time_s=1e-3, ranks=1, link_bytes_per_s=450e9) is None
    found = collective_utilization(operation, nbytes=1e9, time=TIME, ranks=1, ceiling=link_ceiling(row("l4")))
    assert found == Utilization(metric="busbw_utilization", value=None, low=None, high=None, ceiling=None)


@pytest.mark.parametrize(
    ("operation", "ranks", "fault"),
    [("allreduce", 8, "operation='allreduce' is not known; use one of all_gather"), ("reduce", 0, "ranks=0")],
)
def test_collectives_that_cannot_be(operation: str, ranks: int, fault: str) -> None:
    with pytest.raises(CaseError, match=fault):
        busbw_factor(operation, ranks)


def test_roofline_of_an_a100() -> None:
    """The ridge of an A100-40GB in bf16 is 312e12 / 1555e9 = 200.6 FLOPs per byte."""
    peaks = {"flops_per_s": 312e12, "bytes_per_s": 1555e9}
    assert roofline_time_s(flops=312e12, nbytes=1555e9 / 2, **peaks) == 1
    assert roofline_bound(flops=312e12, nbytes=1555e9 / 2, **peaks) == "compute"
    assert roofline_time_s(flops=312e12 / 2, nbytes=1555e9 * 3, **peaks) == 3
    assert roofline_bound(flops=312e12 / 2, nbytes=1555e9 * 3, **peaks) == "memory"
    assert roofline_bound(flops=201, nbytes=1, **peaks) == "compute"
    assert roofline_bound(flops=200, nbytes=1, **peaks) == "memory"
    assert roofline_bound(flops=312e12, nbytes=1555e9, **peaks) == "compute"


def test_arithmetic_intensity() -> None:
    assert arithmetic_intensity(flops=2 * 4096**3, nbytes=3 * 4096**2 * 2) == pytest.approx(1365.33, rel=1e-5)
    assert arithmetic_intensity(flops=1, nbytes=0) is None


@pytest.mark.parametrize("time_s", [0, -1, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(time_s: float) -> None:
    with pytest.raises(CaseError, match=r"time_s=.* must be a positive number"):
        mfu(flops=1, time_s=time_s, peak_flops_per_s=1)
    with pytest.raises(CaseError, match="must be a positive number"):
        mbu(nbytes=1, time_s=time_s, bytes_per_s=1)
    with pytest.raises(CaseError, match="must be a positive number"):
        algbw_bytes_per_s(nbytes=1, time_s=time_s)
    with pytest.raises(CaseError, match=r"time\.low"):
        compute_utilization(flops=1, nbytes=1, time=TimeS(median=1, low=time_s, high=1), ceiling=None)


def test_work_and_peaks_that_are_none_are_refused() -> None:
    with pytest.raises(CaseError, match="flops=-1 must be zero or more"):
        mfu(flops=-1, time_s=1, peak_flops_per_s=1)
    with pytest.raises(CaseError, match="peak_flops_per_s=0 must be a positive number"):
        mfu(flops=1, time_s=1, peak_flops_per_s=0)
    with pytest.raises(CaseError, match="nbytes=nan"):
        arithmetic_intensity(flops=1, nbytes=math.nan)


def test_ceilings_of_a_data_sheet() -> None:
    h100 = row("h100-sxm5-80gb")
    assert compute_ceiling(h100, "bf16") == Ceiling(
        kind="flops", value=989.5e12, unit="FLOP/s", source="datasheet", detail="h100-sxm5-80gb bf16 dense"
    )
    int8 = compute_ceiling(h100, "int8")
    assert int8 is not None
    assert (int8.kind, int8.unit, int8.value) == ("ops", "OP/s", 1979e12)
    assert compute_ceiling(h100, "fp64", matmul=False) == Ceiling(
        kind="flops", value=34e12, unit="FLOP/s", source="datasheet", detail="h100-sxm5-80gb fp64 dense"
    )
    assert memory_ceiling(h100).value == 3.35e12
    link = link_ceiling(h100)
    assert link is not None
    assert (link.kind, link.value) == ("wire_bytes", 450e9)


def test_what_has_no_peak_has_no_ceiling() -> None:
    assert compute_ceiling(row("t4"), "bf16") is None
    assert compute_ceiling(row("b200-sxm-180gb"), "fp4") is not None
    assert link_ceiling(row("l4")) is None


def test_the_longest_time_gives_the_lowest_utilization() -> None:
    ceiling = compute_ceiling(row("a100-sxm4-40gb"), "bf16")
    found = compute_utilization(flops=312e12, nbytes=1e12, time=TIME, ceiling=ceiling, bound="compute")
    assert (found.low, found.value, found.high) == pytest.approx((0.4, 0.5, 0.625))
    assert (found.metric, found.bound, found.arithmetic_intensity) == ("mfu", "compute", 312)
    assert found.ceiling == ceiling
    memory = memory_utilization(flops=0, nbytes=1555e9, time=TIME, ceiling=memory_ceiling(row("a100-sxm4-40gb")))
    assert (memory.metric, memory.low, memory.value, memory.high) == ("mbu", 0.4, 0.5, 0.625)


def test_without_a_ceiling_there_is_no_value_and_it_still_writes() -> None:
    found = memory_utilization(flops=1, nbytes=2, time=TIME, ceiling=None)
    assert (found.value, found.low, found.high, found.arithmetic_intensity) == (None, None, None, 0.5)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Utilization) == found


def test_collective_utilization_with_its_interval() -> None:
    """2 s for 900 GB of all-reduce on 8 ranks: 787.5 GB/s on a 450 GB/s link, above it, and kept as it is."""
    ceiling = link_ceiling(row("h100-sxm5-80gb"))
    found = collective_utilization("all_reduce", nbytes=900e9, time=TIME, ranks=8, ceiling=ceiling)
    assert found.value == pytest.approx(1.75)
    assert found.low == pytest.approx(1.4)


POSITIVE = st.floats(min_value=1e-6, max_value=1e18)


@given(flops=POSITIVE, nbytes=POSITIVE, flops_per_s=POSITIVE, bytes_per_s=POSITIVE)
def test_the_roofline_is_never_passed(flops: float, nbytes: float, flops_per_s: float, bytes_per_s: float) -> None:
    time_s = roofline_time_s(flops=flops, nbytes=nbytes, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
    compute = mfu(flops=flops, time_s=time_s, peak_flops_per_s=flops_per_s)
    memory = mbu(nbytes=nbytes, time_s=time_s, bytes_per_s=bytes_per_s)
    bound = roofline_bound(flops=flops, nbytes=nbytes, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
    assert max(compute, memory) == pytest.approx(1)
    assert (compute if bound == "compute" else memory) == pytest.approx(1)


@given(ranks=st.integers(min_value=2, max_value=4096), operation=st.sampled_from(sorted(COLLECTIVE_OPS)))
def test_bus_bandwidth_factors_stay_within_their_limits(ranks: int, operation: str) -> None:
    assert 0.5 <= busbw_factor(operation, ranks) < 2
