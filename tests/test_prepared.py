"""Steps that bring more than a call: their own check, work before a block, shares of the step, what they hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from perfsuite.measure import attempt as attempt_module
from perfsuite.measure.attempt import AttemptSpec, attempt
from perfsuite.measure.bench import Bench
from perfsuite.measure.clock import FakeClock
from perfsuite.measure.control import Control, control_for
from perfsuite.measure.fit import why_skip
from perfsuite.measure.launch import NotCapturedError
from perfsuite.measure.measurement import CeilingSample, Measurement
from perfsuite.verdict import Failure, Outcome
from perfsuite.workloads.base import Prepared, Target, Work
from perfsuite.workloads.kernel import Kernel

SPEC = AttemptSpec(budget_s=10.0, iteration_limit_s=0.25)
CPU = Target(backend="cpu", sku="cpu-test")
GPU = Target(backend="cuda", sku="h100-sxm5-80gb", compute_capability="9.0")
STEP_S = 0.002


@dataclass
class Log:
    """What happened to a step, in order, under a clock that only the step moves."""

    clock: FakeClock = field(default_factory=FakeClock)
    events: list[str] = field(default_factory=list)

    def note(self, event: str) -> Callable[[], None]:
        return lambda: self.events.append(event)

    def step(self) -> None:
        self.events.append("step")
        self.clock.advance(STEP_S)

    def kernel(self, **more: Any) -> Kernel:
        return Kernel(lambda device: Prepared(step=self.step, **more), flops=4_000_000, nbytes=1000)


def bench(clock: FakeClock, target: Target = CPU) -> Bench:
    """Ceilings are known, so that nothing is probed."""
    keys = ("compute.fp32", "compute.bf16", "memory", "memory.1000")
    known = {key: CeilingSample(key=key, rate_per_s=1e9, unit="FLOP/s", detail="known") for key in keys}
    return Bench(torch_device="cpu", target=target, clock=clock, ceilings=known)


@pytest.fixture(autouse=True)
def edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control that takes no time of the fake clock would have no rate, and peak memory is asked of no device."""
    monkeypatch.setattr(attempt_module, "control_for", lambda **case: None)
    monkeypatch.setattr(attempt_module, "peak_memory_bytes", lambda step, backend: 1000)


def measured(result: Measurement | Failure) -> Measurement:
    assert isinstance(result, Measurement), result
    return result


def test_what_a_case_finds_wrong_with_itself_is_incorrect_and_nothing_is_timed() -> None:
    log = Log()
    result = attempt(log.kernel(check=lambda: "the loss did not fall"), SPEC, bench(log.clock))
    assert isinstance(result, Failure)
    assert (result.outcome, result.reason) == (Outcome.INCORRECT, "the loss did not fall")
    assert log.events == ["step"]


def test_a_case_that_finds_nothing_wrong_is_measured() -> None:
    log = Log()
    assert measured(attempt(log.kernel(check=lambda: None), SPEC, bench(log.clock))).time.median_s == pytest.approx(
        STEP_S
    )


def test_before_every_block_the_case_gets_ready_untimed() -> None:
    log = Log()

    def ready() -> None:
        log.events.append("ready")
        log.clock.advance(10 * STEP_S)

    each = measured(attempt(log.kernel(before_block=ready), SPEC, bench(log.clock)))
    assert log.events.count("ready") == each.time.samples + 2  # and before the check at the start and at the end
    assert each.time.median_s == pytest.approx(STEP_S)
    assert each.overhead.warmup_s >= each.time.samples * 10 * STEP_S


def test_shares_are_those_since_the_reset_after_warm_up() -> None:
    log = Log()
    case = log.kernel(reset=log.note("reset"), shares=lambda: {"input_wait": log.events.count("step") / 1000})
    each = measured(attempt(case, SPEC, bench(log.clock)))
    assert log.events.count("reset") == 1
    assert each.shares["input_wait"] == (len(log.events) - 2) / 1000  # all but the reset and the last check
    assert log.events.index("reset") > 50  # 0.1 s of warm-up at 2 ms a step
    assert measured(attempt(log.kernel(), SPEC, bench(log.clock))).shares == {}


def test_peak_memory_on_a_cpu_holds_what_stays_between_steps() -> None:
    """An allocator that knows everything, as a GPU's does, has counted that already."""
    log = Log()
    case = log.kernel(resident_bytes=lambda: 234)
    assert measured(attempt(case, SPEC, bench(log.clock))).peak_memory_bytes == 1234
    assert measured(attempt(case, SPEC, bench(log.clock, GPU))).peak_memory_bytes == 1000


@pytest.mark.parametrize("at", ["step", "check", "shares"])
def test_what_a_case_started_is_ended_whatever_happens(at: str) -> None:
    log = Log()

    def fail() -> Any:
        raise KeyboardInterrupt

    parts: dict[str, Any] = {"step": log.step, "close": log.note("closed"), at: fail}
    with pytest.raises(KeyboardInterrupt):
        attempt(Kernel(lambda device: Prepared(**parts), flops=4_000_000, nbytes=1000), SPEC, bench(log.clock))
    assert log.events[-1] == "closed"


def test_every_copy_is_ended() -> None:
    log = Log()
    on_gpu = bench(log.clock, GPU)
    on_gpu.l2_bytes = 1000
    attempt(log.kernel(close=log.note("closed")), SPEC, on_gpu)
    assert log.events.count("closed") == 4


class Still(Kernel):
    """A kernel that is not run over copies."""

    rotates = False


def test_a_case_may_refuse_to_be_copied() -> None:
    log, built = Log(), list[str]()

    def build(device: str) -> Prepared:
        built.append(device)
        return Prepared(step=log.step)

    on_gpu = bench(log.clock, GPU)
    on_gpu.l2_bytes = 1000
    attempt(Still(build, flops=4_000_000, nbytes=1000), SPEC, on_gpu)
    assert built == ["cpu"]


# How a step is asked to reach the device


class Asking(Kernel):
    """A kernel that says how it wants to be launched."""

    asked = "graph"

    def launch(self) -> str | None:
        return self.asked


def test_a_graph_that_is_asked_for_holds_one_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    log, counts = Log(), list[int]()

    def capture(steps: list[Callable[[], None]], count: int) -> Callable[[], None]:
        counts.append(count)
        return log.step

    monkeypatch.setattr(attempt_module, "capture", capture)
    each = measured(attempt(Asking(lambda device: log.step, flops=4_000_000), SPEC, bench(log.clock, GPU)))
    assert (each.launch, counts) == ("graph", [1])


def test_a_graph_that_is_asked_for_and_cannot_be_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(steps: object, count: int) -> Callable[[], None]:
        raise NotCapturedError("the step cannot be captured in a CUDA graph: it waits")

    monkeypatch.setattr(attempt_module, "capture", capture)
    log = Log()
    result = attempt(Asking(lambda device: log.step, flops=4_000_000), SPEC, bench(log.clock, GPU))
    assert isinstance(result, Failure)
    assert (result.outcome, result.reason) == (
        Outcome.ERROR,
        "the step cannot be captured in a CUDA graph: it waits",
    )


class Eager(Asking):
    """A kernel that is to be launched one by one, however short."""

    asked = "eager"


def test_a_launch_that_is_asked_for_is_kept() -> None:
    log = Log()
    assert measured(attempt(Eager(lambda device: log.step, flops=1000), SPEC, bench(log.clock, GPU))).launch == "eager"


# Several data types


class Mixed(Kernel):
    """Work in two data types."""

    sized = True

    def work(self) -> Work:
        return Work(
            flops=4_000_000,
            nbytes=1000,
            flops_by_dtype=(("bf16", 3_000_000), ("fp32", 1_000_000)),
            hardware_flops=5_000_000,
            tokens=16,
            flops_by_convention=(("palm", 6_000_000),),
        )


def test_each_data_type_offers_a_ceiling_and_the_counts_travel() -> None:
    log = Log()
    each = measured(attempt(Mixed(lambda device: log.step, dtype="bf16"), SPEC, bench(log.clock)))
    assert [offer.key for offer in each.ceilings] == ["compute.bf16", "compute.fp32"]
    assert each.flops_by_dtype == {"bf16": 3_000_000, "fp32": 1_000_000}
    assert (each.tokens, each.hardware_flops, each.flops_by_convention) == (16, 5_000_000, {"palm": 6_000_000})


def test_the_least_time_of_several_data_types_is_that_of_each_at_its_own_rate() -> None:
    """3 MFLOP at 1 MFLOP/s and 1 MFLOP at 0.5 MFLOP/s are 5 s."""
    slow = bench(FakeClock())
    for key, rate in (("compute.bf16", 1e6), ("compute.fp32", 5e5)):
        slow.ceilings[key] = replace_rate(slow.ceilings[key], rate)
    case = Mixed(lambda device: lambda: None, dtype="bf16")
    reason = why_skip(case, case.work(), slow, memory_free_bytes=None, iteration_limit_s=4.9)
    assert reason == "one iteration takes at least 5.00 s (4.00 MFLOP at 800 kFLOP/s), the limit is 4.90 s"
    assert why_skip(case, case.work(), slow, memory_free_bytes=None, iteration_limit_s=5.1) is None


def replace_rate(sample: CeilingSample, rate_per_s: float) -> CeilingSample:
    return CeilingSample(key=sample.key, rate_per_s=rate_per_s, unit=sample.unit, detail=sample.detail)


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", 9e9), ("fp64", 1e9)])
def test_a_cpu_holds_narrow_floats_against_fp32_too(dtype: str, expected: float) -> None:
    """bf16 matmuls may be 40 times as slow as what torch's attention does in bf16 with fp32's units."""
    here = bench(FakeClock())
    here.ceilings["compute.fp32"] = replace_rate(here.ceilings["compute.fp32"], 9e9)
    here.ceilings["compute.fp64"] = here.ceilings["compute.bf16"]
    log = Log(clock=here.clock)  # type: ignore[arg-type] # the fake clock of the bench
    case = Kernel(lambda device: log.step, flops=4_000_000, nbytes=1000, dtype=dtype)
    (offer,) = measured(attempt(case, SPEC, here)).ceilings
    assert offer.rate_per_s == expected


# The control of a training step


def test_a_training_steps_control_multiplies_and_moves_in_its_proportion() -> None:
    """2 x 64^3 FLOP and, at 0.5 bytes a FLOP, 262,144 bytes: 131,072 read and as many written."""
    control = control_for(metric="mfu", flops=600_000, nbytes=300_000, dtype="fp32", kind="mixed")
    assert control.name == "numpy.matmul[64,float32]+libc.memmove[131072]"
    assert (control.work, control.unit) == (1.0, "calls")
    control.step()


def test_a_mixed_controls_rate_is_no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts calls: taken for FLOP/s these 10^12 a second would be the best ceiling."""
    log = Log()
    beside = Control(name="m", version="1", work=1e9, unit="calls", step=lambda: log.clock.advance(1e-3))
    monkeypatch.setattr(attempt_module, "control_for", lambda **case: beside)
    (offer,) = measured(attempt(log.kernel(), SPEC, bench(log.clock))).ceilings
    assert (offer.key, offer.detail) == ("compute.fp32", "known")


def test_a_mixed_control_is_bounded_and_never_empty() -> None:
    huge = control_for(metric="mfu", flops=600_000, nbytes=10**13, dtype="fp32", kind="mixed")
    assert huge.name.endswith(f"libc.memmove[{32 * 1024**2}]")
    nothing = control_for(metric="mfu", flops=0, nbytes=None, dtype="fp64", kind="mixed")
    assert nothing.name == "numpy.matmul[256,float64]+libc.memmove[1]"
    assert math.isclose(nothing.work, 1.0)
