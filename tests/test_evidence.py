"""From measurements to evidence and records: rates, ceilings, what cannot be true, and what is written."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from msgspec.structs import replace

from perfsuite.baseline import Row, make_row
from perfsuite.ceilings import IMPLAUSIBLE_MEASURED, Ceilings
from perfsuite.evidence import TimedMeasurement, build_record, declared_work, gather_evidence, rates
from perfsuite.hardware.catalogue import load
from perfsuite.hardware.device import Device
from perfsuite.measure.measurement import CeilingSample, Compilation, ControlSummary, Measurement, Overhead, TimeSummary
from perfsuite.measure.metric import metric_of, ridge
from perfsuite.record import CompilationPart, Record, decode, encode
from perfsuite.verdict import Failure, Outcome, Verdict
from perfsuite.workloads.base import Workload
from perfsuite.workloads.gemm import Gemm
from perfsuite.workloads.latency import Launch
from perfsuite.workloads.memory import Copy

TERA = 1e12
MEASUREMENT = Measurement(
    workload={"kind": "gemm"},
    dtype="bf16",
    metric="mfu",
    launch="eager",
    precision={"fill": "random"},
    flops=10**12,
    flops_by_dtype={"bf16": 10**12},
    flop_convention="exact",
    nbytes=10**9,
    wire_bytes=0,
    time=TimeSummary(median_s=0.002, low_s=0.001, high_s=0.004, samples=20),
    y=math.log(5e14),
    y_low=math.log(2.5e14),
    y_high=math.log(1e15),
    durations_s=(0.002,) * 20,
    overhead=Overhead(wall_s=1, build_s=0, warmup_s=0, timed_s=0, control_s=0, sampling_wall_s=0),
)
"""10^12 FLOP and 10^9 bytes in 2 ms, between 1 and 4 ms."""


def gpu(sku: str, **rest: Any) -> Device:
    row = load().by_sku(sku)
    assert row is not None
    name = row.device_names[0]
    return Device(backend="cuda", index=0, name=name, uuid_hash="0123", sku=sku, family=row.family, known=True, **rest)


H100 = gpu("h100-sxm5-80gb")
CPU = Device(backend="cpu", index=0, name="Some CPU", uuid_hash=None, sku="cpu-some", family="cpu", known=False)


def at_rate(rate_per_s: float, **rest: Any) -> Measurement:
    """The measurement whose FLOP/s are ``rate_per_s``, exactly."""
    seconds = MEASUREMENT.flops / rate_per_s
    time = TimeSummary(median_s=seconds, low_s=seconds, high_s=seconds, samples=20)
    return replace(MEASUREMENT, time=time, y=math.log(rate_per_s), **rest)


def timed(measurement: Measurement, *, fresh: bool = False) -> TimedMeasurement:
    return TimedMeasurement(measurement=measurement, start_s=1.23456, fresh=fresh)


def implausible(measurement: Measurement, ceilings: Ceilings) -> str | None:
    return gather_evidence([timed(measurement)], None, (), ceilings, all_fresh=False).implausible


def record(latest: Measurement | None, ceilings: Ceilings, *, row: Row | None = None, **rest: Any) -> Record:
    """The record of one attempt, which was judged PASS."""
    return build_record(
        run="r1",
        case="cases/gemm.py::bench_gemm",
        verdict=rest.pop("verdict", Verdict(outcome=Outcome.PASS, reason="+0.0% against the baseline")),
        failure=rest.pop("failure", None),
        latest=latest,
        attempts=[] if latest is None else [timed(latest, fresh=True)],
        device=ceilings.device,
        ceilings=ceilings,
        row=row,
        row_environment={"torch": "2.12.0"},
        tolerance=0.03,
        drill_percent=0.0,
        environment={"torch": "2.13.0", "cuda": None},
        **rest,
    )


# Rates


@pytest.mark.parametrize(("metric", "work"), [("mfu", 1e12), ("mbu", 1e9), ("latency_us", 7)])
def test_rates_count_the_judged_work(metric: str, work: float) -> None:
    """FLOPs, bytes or calls. The longest time gives the lowest rate."""
    expected = (work / 0.002, work / 0.004, work / 0.001)
    assert rates(replace(MEASUREMENT, metric=metric, calls=7)) == pytest.approx(expected)


def test_too_few_samples_bound_no_rate() -> None:
    unbounded = replace(MEASUREMENT.time, low_s=-math.inf, high_s=math.inf)
    assert rates(replace(MEASUREMENT, time=unbounded)) == (5e14, 0.0, math.inf)


# Ceilings from data sheets


@pytest.mark.parametrize(
    ("sku", "dtype", "tera"),
    [
        ("h100-nvl-94gb", "bf16", 835.5),
        ("h200-sxm-141gb", "bf16", 989.5),
        ("h100-sxm5-80gb", "bf16", 989.5),
        ("h100-sxm5-80gb", "fp8", 1979),
        ("h100-sxm5-80gb", "fp64", 67),
        ("b300-sxm-288gb", "bf16", 2250),
        ("mi250x", "bf16", 191.5),  # a die, half of the package's 383
    ],
)
def test_the_ceiling_is_the_dense_peak_of_the_data_type(sku: str, dtype: str, tera: float) -> None:
    ceiling = Ceilings(device=gpu(sku)).of(replace(MEASUREMENT, dtype=dtype, flops_by_dtype={dtype: 10**12}))
    assert ceiling is not None
    assert ceiling.value == pytest.approx(tera * TERA)
    assert (ceiling.kind, ceiling.unit, ceiling.source) == ("compute", "FLOP/s", "datasheet")
    assert ceiling.detail == f"{sku} {dtype} dense"


@pytest.mark.parametrize(("sku", "gb_per_s"), [("h100-sxm5-80gb", 3350), ("mi250x", 1640)])
def test_the_ceiling_of_memory_bound_work_is_the_bandwidth(sku: str, gb_per_s: float) -> None:
    ceiling = Ceilings(device=gpu(sku)).of(replace(MEASUREMENT, metric="mbu"))
    assert ceiling is not None
    assert (ceiling.kind, ceiling.value, ceiling.unit) == ("memory", gb_per_s * 1e9, "B/s")


def test_integer_work_is_held_against_operations() -> None:
    ceiling = Ceilings(device=H100).of(replace(MEASUREMENT, dtype="int8", flops_by_dtype={"int8": 10**12}))
    assert ceiling is not None
    assert ceiling.value == pytest.approx(1979 * TERA)
    assert ceiling.unit == "OP/s"


def test_latency_has_no_ceiling_on_a_data_sheet() -> None:
    assert Ceilings(device=H100).of(replace(MEASUREMENT, metric="latency_us")) is None


@pytest.mark.parametrize("flops_by_dtype", [{"bf16": 10**12}, {"fp16": 10**11, "bf16": 9 * 10**11}])
def test_a_peak_that_the_data_sheet_lacks_is_no_ceiling(flops_by_dtype: dict[str, int]) -> None:
    """A V100 has no bf16: never another type's peak."""
    v100 = Ceilings(device=gpu("v100-sxm2-16gb"))
    assert v100.of(replace(MEASUREMENT, flops_by_dtype=flops_by_dtype)) is None


def test_mixed_data_types_each_count_at_their_own_peak() -> None:
    """A second's worth of bf16 and one of fp8, done in four seconds: (1 + 1) / 4."""
    by_dtype = {"bf16": int(989.5 * TERA), "fp8": int(1979 * TERA)}
    time = TimeSummary(median_s=4.0, low_s=4.0, high_s=4.0, samples=20)
    mixed = replace(MEASUREMENT, flops=sum(by_dtype.values()), flops_by_dtype=by_dtype, time=time)
    written = record(mixed, Ceilings(device=H100))
    assert written.value == pytest.approx(0.5)
    assert written.ceiling is not None
    assert written.ceiling.detail == "h100-sxm5-80gb bf16 dense + h100-sxm5-80gb fp8 dense"


def test_measured_ceilings_of_several_data_types_add_up_their_times() -> None:
    """3 TFLOP at 3 TFLOP/s and 1 at 0.5 take 3 s at best: 4/3 TFLOP/s, of which 4 TFLOP in 6 s are a half."""
    by_dtype = {"bf16": 3 * 10**12, "fp32": 10**12}
    time = TimeSummary(median_s=6.0, low_s=6.0, high_s=6.0, samples=20)
    mixed = replace(MEASUREMENT, flops=4 * 10**12, flops_by_dtype=by_dtype, time=time)
    ceilings = Ceilings(device=CPU)
    ceilings.note(replace(MEASUREMENT, ceilings=(offer("compute.bf16", 3e12),)))
    assert ceilings.of(mixed) is None
    ceilings.note(replace(MEASUREMENT, ceilings=(offer("compute.fp32", 5e11),)))
    written = record(mixed, ceilings)
    assert written.value == pytest.approx(0.5)
    assert written.flops_by_dtype == by_dtype
    assert written.ceiling is not None
    assert written.ceiling.detail == "best of probe of compute.bf16 + probe of compute.fp32"


# Other counts of the same step


def test_recomputation_counts_for_hfu_alone_and_other_conventions_have_a_figure_of_their_own() -> None:
    """10^12 FLOP in 2 ms of 989.5 TFLOP/s are 50.5 %; with a third more done by the hardware 67.4 %."""
    counted = replace(
        MEASUREMENT, hardware_flops=4 * 10**12 // 3, flops_by_convention={"palm": 11 * 10**11}, tokens=4096
    )
    written = record(counted, Ceilings(device=H100))
    assert written.value == pytest.approx(500 / 989.5)
    assert written.hfu == pytest.approx(4 / 3 * 500 / 989.5)
    assert written.mfu_by_convention == {"palm": pytest.approx(1.1 * 500 / 989.5)}
    assert written.tokens_per_s == pytest.approx(4096 / 0.002)
    assert written.hardware_flops == 4 * 10**12 // 3


@pytest.mark.parametrize("metric", ["mbu", "latency_us"])
def test_what_is_not_held_against_compute_has_no_hfu(metric: str) -> None:
    counted = replace(MEASUREMENT, metric=metric, hardware_flops=10**12, flops_by_convention={"palm": 10**12})
    written = record(counted, Ceilings(device=H100))
    assert (written.hfu, written.mfu_by_convention, written.tokens_per_s) == (None, {}, None)


def test_compilation_shares_and_predicted_memory_are_written() -> None:
    done = Compilation(seconds=12.5, graphs=2, graph_breaks=("a print",), fallbacks=("too many shapes",))
    seen = replace(
        MEASUREMENT, compilation=done, shares={"input_wait": 0.6}, predicted_memory_bytes={"parameters": 4096}
    )
    written = record(seen, Ceilings(device=H100))
    assert written.compilation == CompilationPart(
        seconds=12.5, graphs=2, graph_breaks=("a print",), fallbacks=("too many shapes",)
    )
    assert (written.shares, written.predicted_memory_bytes) == ({"input_wait": 0.6}, {"parameters": 4096})
    assert decode(encode(written), "here") == written


# What cannot be true


def test_an_unlisted_name_no_longer_gets_another_cards_peak() -> None:
    """A B300 that makes 329.8 TFLOP/s is at 14.7 %; against an A100's 312 it would be at 105.7 %."""
    measurement, ceilings = at_rate(329.8 * TERA), Ceilings(device=gpu("b300-sxm-288gb"))
    assert ceilings.device.name == "NVIDIA B300 SXM6 AC"
    assert record(measurement, ceilings).value == pytest.approx(329.8 / 2250)
    assert implausible(measurement, ceilings) is None
    a100 = implausible(measurement, Ceilings(device=gpu("a100-sxm4-80gb")))
    assert a100 is not None
    assert a100.startswith("330 TFLOP/s is 106% of the datasheet ceiling of 312 TFLOP/s")


@pytest.mark.parametrize(("tera", "fault"), [(989.4, False), (989.6, True)])
def test_a_rate_above_the_peak_is_a_fault(tera: float, fault: bool) -> None:
    """Such as a step that returns before its work is done."""
    reason = implausible(at_rate(tera * TERA), Ceilings(device=H100))
    assert (reason is not None) is fault
    assert reason is None or "the step returns before its work is done" in reason


def test_a_rate_above_the_bandwidth_is_a_fault() -> None:
    memory = replace(MEASUREMENT, metric="mbu", nbytes=int(3350e9 * 0.002 * 1.01))
    assert "101% of the datasheet ceiling" in (implausible(memory, Ceilings(device=H100)) or "")


def test_every_attempt_is_looked_at() -> None:
    attempts = [timed(MEASUREMENT), timed(at_rate(2000 * TERA))]
    evidence = gather_evidence(attempts, None, (), Ceilings(device=H100), all_fresh=False)
    assert evidence.implausible is not None


@pytest.mark.parametrize(("max_clock_mhz", "limit_tera"), [(None, 989.5), (915, 989.5), (1830, 989.5), (1980, 1070.6)])
def test_only_a_clock_above_boost_moves_the_limit_and_never_the_peak(
    max_clock_mhz: float | None, limit_tera: float
) -> None:
    """Boost is 1830 MHz: at half of it the peak stays, at 1980 the limit is 989.5 * 1980 / 1830."""
    ceilings = Ceilings(device=gpu("h100-sxm5-80gb", max_clock_mhz=max_clock_mhz))
    assert implausible(at_rate((limit_tera - 0.1) * TERA), ceilings) is None
    assert implausible(at_rate((limit_tera + 0.1) * TERA), ceilings) is not None
    assert record(MEASUREMENT, ceilings).value == pytest.approx(500 / 989.5)


def test_a_throttled_clock_stands_beside_the_utilization_and_does_not_scale_it() -> None:
    written = record(replace(MEASUREMENT, conditions={"sm_clock_mhz": 915}), Ceilings(device=H100))
    assert written.value == pytest.approx(500 / 989.5)
    assert written.conditions == {"sm_clock_mhz": 915}


# Measured ceilings


def offer(key: str, rate_per_s: float, *, unit: str = "FLOP/s") -> CeilingSample:
    return CeilingSample(key=key, rate_per_s=rate_per_s, unit=unit, detail=f"probe of {key}")


def beside(name: str, rate_per_s: float, nbytes: int = MEASUREMENT.nbytes or 0) -> Measurement:
    """Memory-bound work on ``nbytes`` beside the memmove ``name``, whose rate it offers for that size."""
    control = ControlSummary(name=name, version="2.36", unit="B/s", rate_per_s=rate_per_s)
    ceiling = offer(f"memory.{nbytes}", rate_per_s, unit="B/s")
    return replace(MEASUREMENT, metric="mbu", nbytes=nbytes, control=control, ceilings=(ceiling,))


def test_the_best_rate_of_the_session_is_the_ceiling_and_says_so() -> None:
    ceilings = Ceilings(device=CPU)
    assert ceilings.of(MEASUREMENT) is None
    for rate_per_s in (6e14, 8e14, 7e14, math.nan, math.inf):
        ceilings.note(replace(MEASUREMENT, ceilings=(offer("compute.bf16", rate_per_s),)))
    ceiling = ceilings.of(MEASUREMENT)
    assert ceiling is not None
    assert (ceiling.value, ceiling.source, ceiling.kind) == (8e14, "measured", "compute")
    assert ceiling.detail == "best of probe of compute.bf16"


def test_a_ceiling_is_of_one_data_type() -> None:
    ceilings = Ceilings(device=CPU)
    ceilings.note(replace(MEASUREMENT, ceilings=(offer("compute.fp32", 1e14),)))
    assert ceilings.of(MEASUREMENT) is None


def test_a_memory_ceiling_is_never_another_sizes_memmove() -> None:
    """A copy that fits into a cache is many times as fast as one that does not."""
    small, large = beside("libc.memmove[4096]", 100e9, 8192), beside("libc.memmove[67108864]", 10e9, 2**27)
    ceilings = Ceilings(device=CPU)
    ceilings.note(small)
    assert ceilings.of(large) is None
    ceilings.note(large)
    values = [ceiling and ceiling.value for ceiling in map(ceilings.of, (small, large))]
    assert values == [100e9, 10e9]


def test_without_a_control_memory_is_held_against_the_large_copy() -> None:
    ceilings = Ceilings(device=replace(H100, known=False))
    ceilings.note(replace(MEASUREMENT, metric="mbu", ceilings=(offer("memory", 3e12, unit="B/s"),)))
    ceiling = ceilings.of(replace(MEASUREMENT, metric="mbu"))
    assert ceiling is not None
    assert (ceiling.kind, ceiling.value, ceiling.unit) == ("memory", 3e12, "B/s")


def test_a_measured_ceiling_is_passed_by_better_kernels_but_not_threefold() -> None:
    assert IMPLAUSIBLE_MEASURED == 3
    ceilings = Ceilings(device=replace(CPU, max_clock_mhz=9000.0))
    ceilings.note(replace(MEASUREMENT, ceilings=(offer("compute.bf16", 1e14),)))
    assert implausible(at_rate(2.9e14), ceilings) is None
    assert "310% of the measured ceiling" in (implausible(at_rate(3.1e14), ceilings) or "")


# Evidence


def test_an_attempt_carries_what_is_judged() -> None:
    """The high end of its utilization is that of the shortest time: 10^15 FLOP/s."""
    measurement = replace(MEASUREMENT, peak_memory_bytes=4096, disturbed="throttled")
    evidence = gather_evidence([timed(measurement)], None, ("flops 1 -> 2",), Ceilings(device=H100), all_fresh=False)
    (attempt,) = evidence.attempts
    assert (attempt.y, attempt.low, attempt.high) == (MEASUREMENT.y, MEASUREMENT.y_low, MEASUREMENT.y_high)
    assert attempt.utilization_high == pytest.approx(1000 / 989.5)
    assert (attempt.peak_memory_bytes, attempt.disturbed) == (4096, "throttled")
    assert evidence.changes == ("flops 1 -> 2",)


@pytest.mark.parametrize("metric", ["latency_us", "mfu"])
def test_without_a_utilization_no_floor_can_be_missed(metric: str) -> None:
    """A latency has none although calls have a ceiling, and compute has none where nothing was probed."""
    measurement = replace(MEASUREMENT, metric=metric, ceilings=(offer("calls", 1e7, unit="calls/s"),))
    ceilings = Ceilings(device=CPU)
    ceilings.note(measurement)
    evidence = gather_evidence([timed(measurement)], None, (), ceilings, all_fresh=False)
    assert evidence.attempts[0].utilization_high is None


@pytest.mark.parametrize(("all_fresh", "confirmations"), [(False, 1), (True, 2)])
def test_where_every_process_is_fresh_the_first_confirms_too(all_fresh: bool, confirmations: int) -> None:
    attempts = [timed(MEASUREMENT), timed(MEASUREMENT)]
    evidence = gather_evidence(attempts, None, (), Ceilings(device=H100), all_fresh=all_fresh)
    assert len(evidence.confirmations) == confirmations


def test_the_declared_work_is_a_rows_fingerprint() -> None:
    control = ControlSummary(name="c", version="1", unit="FLOP/s", rate_per_s=1e9)
    declared = declared_work(replace(MEASUREMENT, control=control, launch="graph", wire_bytes=7))
    assert (declared.flops, declared.nbytes, declared.wire_bytes) == (10**12, 10**9, 7)
    assert (declared.dtype, declared.metric, declared.launch) == ("bf16", "mfu", "graph")
    assert (declared.precision, declared.flop_convention) == ({"fill": "random"}, "exact")
    assert (declared.control, declared.control_version) == ("c", "1")
    assert declared_work(MEASUREMENT).control is None


# Records


def test_a_record_shows_value_interval_and_bound() -> None:
    written = record(MEASUREMENT, Ceilings(device=H100))
    assert written.value == pytest.approx(500 / 989.5)
    assert written.interval == pytest.approx((250 / 989.5, 1000 / 989.5))
    assert written.normalized == pytest.approx(5e14)
    assert (written.metric, written.bound, written.arithmetic_intensity) == ("mfu", "compute", 1000)
    assert written.time_us is not None
    assert written.time_us.median == pytest.approx(2000)
    assert written.time_us.samples == 20
    assert written.environment == {"torch": "2.13.0", "cuda": None}
    (attempt,) = written.attempts
    assert (attempt.fresh, attempt.start_s) == (True, 1.235)
    assert attempt.interval == pytest.approx((2.5e14, 1e15))


def test_a_latency_is_written_in_microseconds() -> None:
    written = record(replace(MEASUREMENT, metric="latency_us"), Ceilings(device=H100))
    assert written.value == pytest.approx(2000)
    assert written.interval == pytest.approx((1000, 4000))
    assert (written.ceiling, written.bound) == (None, "launch")


def test_a_record_names_control_and_baseline() -> None:
    measurement = beside("libc.memmove[4096]", 1e12)
    ceilings = Ceilings(device=CPU)
    ceilings.note(measurement)
    row = make_row(
        ys=(0.0, 0.1, 0.2),
        declared=declared_work(measurement),
        environment="",
        device=None,
        peak_memory_bytes=4096,
        prior_spread=0.03,
    )
    verdict = Verdict(outcome=Outcome.REGRESSED, reason="-9.5%", change=-0.095, resolution=0.08)
    written = record(measurement, ceilings, row=row, verdict=verdict)
    assert written.control is not None
    assert (written.control.name, written.control.version) == ("libc.memmove[4096]", "2.36")
    assert (written.control.rate, written.control.unit) == (1e12, "B/s")
    assert written.value == pytest.approx(0.5)  # 10^9 bytes in 2 ms
    assert written.baseline is not None
    assert written.baseline.runs == pytest.approx((1.0, math.exp(0.1), math.exp(0.2)))
    assert (written.baseline.change, written.baseline.resolution) == (-0.095, 0.08)
    assert (written.baseline.tolerance, written.baseline.environment) == (0.03, {"torch": "2.12.0"})
    assert (written.verdict, written.reason) == ("REGRESSED", "-9.5%")


def test_without_a_ceiling_there_is_no_value() -> None:
    written = record(MEASUREMENT, Ceilings(device=CPU))
    assert (written.value, written.interval, written.ceiling) == (None, None, None)
    assert written.normalized == pytest.approx(5e14)


def test_a_case_that_was_not_measured_keeps_its_traceback() -> None:
    failure = Failure(outcome=Outcome.ERROR, reason="boom", traceback="Traceback ...")
    written = record(None, Ceilings(device=H100), failure=failure)
    assert (written.metric, written.value, written.traceback) == (None, None, "Traceback ...")
    assert written.attempts == ()


@pytest.mark.parametrize("device", [H100, CPU], ids=["data sheet", "measured"])
@pytest.mark.parametrize("metric", ["mfu", "mbu", "latency_us"])
def test_json_has_null_where_a_measurement_has_nan(device: Device, metric: str) -> None:
    """An attempt of which every sample was disturbed: nothing in it is a number."""
    nothing = TimeSummary(median_s=math.nan, low_s=-math.inf, high_s=math.inf, samples=0)
    control = ControlSummary(name="c", version="1", unit="B/s", rate_per_s=math.nan)
    measurement = replace(
        MEASUREMENT,
        metric=metric,
        time=nothing,
        y=math.nan,
        y_low=-math.inf,
        y_high=math.inf,
        control=control,
        ceilings=(offer("memory.c", math.nan),),
        conditions={"steal_share": math.nan},
        disturbed="all were",
    )
    ceilings = Ceilings(device=device)
    ceilings.note(measurement)
    line = encode(record(measurement, ceilings))
    plain = json.loads(line, parse_constant=pytest.fail)
    assert (plain["value"], plain["interval"], plain["normalized"], plain["time_us"]) == (None, None, None, None)
    assert plain["attempts"][0]["normalized"] is None
    assert plain["conditions"] == {"steal_share": None}
    assert decode(line, "results.jsonl:1").verdict == "PASS"


# Which figure is judged


@pytest.mark.parametrize(
    ("workload", "flops", "nbytes", "metric"),
    [
        (Gemm(m=1, n=1, k=1, dtype="bf16"), 2_954, 10, "mfu"),  # 989.5e12 / 3350e9 = 295.4 FLOP a byte
        (Gemm(m=1, n=1, k=1, dtype="bf16"), 2_953, 10, "mbu"),
        (Gemm(m=1, n=1, k=1), 200, 10, "mfu"),  # 67e12 / 3350e9 = 20
        (Gemm(m=1, n=1, k=1), 199, 10, "mbu"),
        (Gemm(m=1, n=1, k=1), 10, None, "mfu"),
        (Gemm(m=1, n=1, k=1), 0, 10, "mbu"),
        (Gemm(m=1, n=1, k=1), 0, None, "latency_us"),
        (Copy(nbytes=4), 10**9, 1, "mbu"),
        (Launch(), 10**9, 1, "latency_us"),
    ],
)
def test_arithmetic_intensity_decides_where_the_workload_does_not(
    workload: Workload, flops: int, nbytes: int | None, metric: str
) -> None:
    assert metric_of(workload, flops, nbytes, backend="cuda", hardware=H100.hardware()) == metric


def test_without_a_data_sheet_the_ridge_is_fixed() -> None:
    assert [ridge("fp32", backend=backend, hardware=None) for backend in ("cpu", "cuda", "xpu")] == [8.0, 100.0, 100.0]
