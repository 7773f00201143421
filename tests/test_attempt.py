"""One attempt of one case: what is built, checked, skipped, timed and summed up, under a clock turned by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from perfsuite.errors import UncountableError
from perfsuite.hardware.catalogue import load
from perfsuite.measure import attempt as attempt_module
from perfsuite.measure import bench as bench_module
from perfsuite.measure import ceiling
from perfsuite.measure import control as control_module
from perfsuite.measure.attempt import MAX_COPIES, AttemptSpec, attempt
from perfsuite.measure.bench import Bench
from perfsuite.measure.clock import FakeClock, HostClock, Step
from perfsuite.measure.control import Control
from perfsuite.measure.launch import NotCapturedError
from perfsuite.measure.measurement import CeilingSample, Measurement
from perfsuite.measure.sampler import MIN_SAMPLES
from perfsuite.measure.stats import Interval
from perfsuite.verdict import Failure, Outcome
from perfsuite.workloads.base import Built, Target
from perfsuite.workloads.gemm import Gemm
from perfsuite.workloads.kernel import Kernel
from perfsuite.workloads.latency import Launch
from perfsuite.workloads.memory import HostToDevice

SPEC = AttemptSpec(budget_s=10.0, iteration_limit_s=0.25)
H100 = load().by_sku("h100-sxm5-80gb")
CPU = Target(backend="cpu", sku="cpu-test")
GPU = Target(backend="cuda", sku="h100-sxm5-80gb", compute_capability="9.0")


def known(key: str, rate_per_s: float) -> CeilingSample:
    return CeilingSample(key=key, rate_per_s=rate_per_s, unit="FLOP/s", detail="known")


class Foreseen(Kernel):
    """A kernel whose work is believed, as that of the workloads with shapes is."""

    sized = True


def cpu_bench(clock: Any = None) -> Bench:
    """A CPU whose ceilings are 1 GFLOP/s and 1 GB/s, so that nothing is probed."""
    ceilings = {
        key: known(key, 1e9) for key in ("compute.fp32", "compute.bf16", "memory", "memory.1000", "memory.8000000")
    }
    return Bench(torch_device="cpu", target=CPU, clock=clock or FakeClock(), ceilings=ceilings)


def kernel(clock: FakeClock, seconds: float, result: Callable[[], Any] = lambda: None, **declared: Any) -> Kernel:
    """A kernel that takes ``seconds`` of ``clock``."""

    def build(device: str) -> Step:
        def step() -> Any:
            clock.advance(seconds)
            return result()

        return step

    return Kernel(build, **declared)


def measured(result: Measurement | Failure) -> Measurement:
    assert isinstance(result, Measurement), result
    return result


def failed(result: Measurement | Failure) -> Failure:
    assert isinstance(result, Failure)
    return result


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeClock], None]:
    """Install a control of 1 MFLOP that takes 0.25 ms of a clock: 4 GFLOP/s."""

    def install(clock: FakeClock) -> None:
        beside = Control(name="c", version="1", work=1e6, unit="FLOP", step=lambda: clock.advance(0.00025))
        monkeypatch.setattr(attempt_module, "control_for", lambda **case: beside)

    return install


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    """A bench that takes itself for a GPU: nothing but the clock and the allocator asks the device."""
    monkeypatch.setattr(attempt_module, "peak_memory_bytes", lambda step, backend: 4096)

    def make(clock: FakeClock, **rest: Any) -> Bench:
        return Bench(torch_device="cpu", target=GPU, clock=clock, **rest)

    return make


# On a CPU


def test_a_real_gemm_beside_its_real_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """64^3: 524288 FLOP and 3 * 64 * 64 * 4 bytes, 10.7 FLOP a byte."""
    monkeypatch.setattr(ceiling, "PROBE_SIZES", (64,))
    monkeypatch.setattr(control_module, "LARGEST_GEMM", 64)
    result = attempt(
        Gemm(m=64, n=64, k=64),
        AttemptSpec(budget_s=0.05, iteration_limit_s=10.0),
        Bench(torch_device="cpu", target=CPU, clock=HostClock(), ceilings={"memory": known("memory", 1e9)}),
    )
    each = measured(result)
    assert (each.metric, each.launch, each.dtype) == ("mfu", "eager", "fp32")
    assert (each.flops, each.nbytes, each.wire_bytes) == (2 * 64**3, 3 * 64 * 64 * 4, 0)
    assert each.workload["kind"] == "gemm"
    assert each.control is not None
    assert each.control.name == "numpy.matmul[64,float32]"
    assert [(offer.key, offer.rate_per_s > 0) for offer in each.ceilings] == [("compute.fp32", True)]
    assert each.peak_memory_bytes == 0  # it writes into an output of its own
    assert each.time.samples == len(each.durations_s)
    assert "dropped_samples" in each.conditions


def test_the_arithmetic_of_a_compute_bound_case(control: Callable[[FakeClock], None]) -> None:
    """4 MFLOP in 2 ms are 2 GFLOP/s, the control does 4: the judged value is ln 0.5."""
    clock = FakeClock()
    control(clock)
    looks: list[tuple[int, Interval]] = []
    each = measured(
        attempt(
            kernel(clock, 0.002, flops=4_000_000, nbytes=1000),
            SPEC,
            cpu_bench(clock),
            lambda samples, interval: looks.append((samples, interval)),
        )
    )
    assert (each.metric, each.flops, each.flop_convention) == ("mfu", 4_000_000, "declared")
    assert each.flops_by_dtype == {"fp32": 4_000_000}
    assert [each.y, each.y_low, each.y_high] == pytest.approx([math.log(0.5)] * 3)
    assert [each.time.median_s, each.time.low_s, each.time.high_s] == pytest.approx([0.002] * 3)
    assert each.durations_s == pytest.approx([0.002] * MIN_SAMPLES)
    assert each.control is not None
    assert (each.control.name, each.control.version, each.control.unit) == ("c", "1", "FLOP/s")
    assert each.control.rate_per_s == pytest.approx(4e9)
    ((samples, interval),) = looks
    assert (samples, interval.median) == (MIN_SAMPLES, each.y)
    assert each.disturbed is None
    assert 0 < each.overhead.control_s < each.overhead.timed_s
    assert each.overhead.timed_s + each.overhead.control_s <= each.overhead.sampling_wall_s
    assert each.overhead.wall_s == pytest.approx(clock.now_s())


@pytest.mark.parametrize(
    ("declared", "metric", "work"),
    [({"flops": 0, "nbytes": 8_000_000}, "mbu", 8e6), ({"flops": 0}, "latency_us", 1.0)],
)
def test_the_judged_rate_counts_bytes_or_calls(
    control: Callable[[FakeClock], None], declared: dict[str, Any], metric: str, work: float
) -> None:
    clock = FakeClock()
    control(clock)
    each = measured(attempt(kernel(clock, 0.002, **declared), SPEC, cpu_bench(clock)))
    assert each.metric == metric
    assert each.y == pytest.approx(math.log(work / 0.002 / 4e9))


@dataclass(frozen=True, kw_only=True)
class Chain(Launch):
    """Seven calls that take 2 ms of a clock."""

    clock: FakeClock
    chain: int = 7

    def build(self, device: str) -> Step:
        return lambda: self.clock.advance(0.002)


def test_a_chain_of_calls_counts_each(control: Callable[[FakeClock], None]) -> None:
    clock = FakeClock()
    control(clock)
    each = measured(attempt(Chain(clock=clock), SPEC, cpu_bench(clock)))
    assert (each.metric, each.calls) == ("latency_us", 7)
    assert each.y == pytest.approx(math.log(7 / 0.002 / 4e9))


@pytest.mark.parametrize(
    ("declared", "key", "rate_per_s"),
    [
        ({"flops": 4_000_000}, "compute.fp32", 4e9),
        ({"flops": 4_000_000, "dtype": "bf16"}, "compute.bf16", 1e9),  # numpy has no bf16 of its own
        (
            {"flops": 0, "nbytes": 8_000_000},
            "memory.8000000",
            1e9,
        ),  # of this size alone; the control beside it moves no bytes
        ({"flops": 0}, ceiling.CALLS_KEY, 4e9),
    ],
)
def test_the_best_of_probe_and_control_is_offered_as_ceiling(
    control: Callable[[FakeClock], None], declared: dict[str, Any], key: str, rate_per_s: float
) -> None:
    """The probes of this bench found 1e9 a second, the control beside the case makes 4e9."""
    clock = FakeClock()
    control(clock)
    (offered,) = measured(attempt(kernel(clock, 0.002, **declared), SPEC, cpu_bench(clock))).ceilings
    assert offered.key == key
    assert offered.rate_per_s == pytest.approx(rate_per_s)


def test_reading_as_many_bytes_is_probed_once_per_size(
    monkeypatch: pytest.MonkeyPatch, control: Callable[[FakeClock], None]
) -> None:
    """The case's 8 x 10^6 bytes: read at 9e9 a second, moved at 5e9, and neither beside the next case again."""
    sizes: list[tuple[str, int]] = []
    clock = FakeClock()

    def probe(name: str, bytes_per_s: float) -> Callable[[int], Control]:
        def make(nbytes: int) -> Control:
            sizes.append((name, nbytes))
            return Control(
                name=name, version="1", work=nbytes, unit="B", step=lambda: clock.advance(nbytes / bytes_per_s)
            )

        return make

    monkeypatch.setattr(bench_module, "read_control", probe("r", 9e9))
    monkeypatch.setattr(bench_module, "memmove_control", probe("m", 5e9))
    control(clock)
    bench = cpu_bench(clock)
    del bench.ceilings["memory.8000000"]
    for _ in range(2):
        each = measured(attempt(kernel(clock, 0.002, flops=0, nbytes=8_000_000), SPEC, bench))
        (offered,) = each.ceilings
        assert (offered.key, offered.detail) == ("memory.8000000", "r 1")
        assert offered.rate_per_s == pytest.approx(9e9)
    assert sizes == [("r", 8_000_000), ("m", 8_000_000)]


def test_a_kernel_with_absurd_flops_is_measured_and_not_skipped(control: Callable[[FakeClock], None]) -> None:
    """Skipped by its own declaration, a wrong one would never be found out."""
    clock = FakeClock()
    control(clock)
    assert measured(attempt(kernel(clock, 0.002, flops=1e15), SPEC, cpu_bench(clock))).flops == 10**15


def test_a_drill_slows_the_step_by_its_percentage_and_is_marked(
    monkeypatch: pytest.MonkeyPatch, control: Callable[[FakeClock], None]
) -> None:
    clock = FakeClock()
    control(clock)
    monkeypatch.setattr(attempt_module, "filler_for", lambda device, metric: lambda: clock.advance(1e-5))
    spec = AttemptSpec(budget_s=10.0, iteration_limit_s=0.25, drill_percent=30.0)
    each = measured(attempt(kernel(clock, 0.002, flops=8_000_000), spec, cpu_bench(clock)))
    assert each.drill_percent == 30.0
    assert each.time.median_s == pytest.approx(0.0026)
    assert each.y == pytest.approx(-math.log(1.3))


def test_preempted_samples_make_the_attempt_invalid(control: Callable[[FakeClock], None]) -> None:
    clock = FakeClock()
    control(clock)

    def build(device: str) -> Step:
        return lambda: clock.advance(0.01, switched=True)

    each = measured(attempt(Kernel(build, flops=1_000), SPEC, cpu_bench(clock)))
    dropped = each.conditions["dropped_samples"]
    assert each.disturbed == f"other processes interrupted {dropped} of {dropped} samples"
    assert dropped > 0
    assert each.durations_s == ()
    assert all(map(math.isnan, (each.y, each.time.median_s)))


# FLOPs that nobody declared


def matmul(device: str) -> Step:
    a, b = torch.ones(3, 5, device=device), torch.ones(5, 7, device=device)
    return lambda: a @ b


def test_undeclared_flops_are_counted() -> None:
    """3 x 5 by 5 x 7: 2 * 3 * 5 * 7 = 210."""
    spec = AttemptSpec(budget_s=0.02, iteration_limit_s=10.0)
    each = measured(attempt(Kernel(matmul, nbytes=4), spec, cpu_bench(HostClock())))
    assert (each.flops, each.flop_convention, each.metric) == (210, "counted", "mfu")
    assert each.flops_by_dtype == {"fp32": 210}


def test_an_operator_without_a_formula_is_named() -> None:
    with pytest.raises(UncountableError, match=r"no FLOP formula for aten\.\S*svd\S*; give flops= in the Kernel"):
        attempt(Kernel(lambda device: lambda: torch.linalg.svdvals(torch.eye(4))), SPEC, cpu_bench(HostClock()))


# What does not fit


def never_built(device: str) -> Built:
    raise AssertionError("a case that does not fit was built")


def test_a_case_that_the_device_cannot_run_is_skipped() -> None:
    failure = failed(attempt(HostToDevice(nbytes=8), SPEC, cpu_bench()))
    assert failure == Failure(outcome=Outcome.SKIPPED, reason="cpu-test: needs a GPU")


def test_memory_that_is_not_free_skips_with_its_arithmetic() -> None:
    """512 x 512 in fp32 is 1 MiB, three times: both inputs and the output."""
    spec = AttemptSpec(budget_s=1.0, iteration_limit_s=10.0, memory_free_bytes=2 * 2**20)
    failure = failed(attempt(Gemm(m=512, n=512, k=512), spec, cpu_bench()))
    assert failure.outcome is Outcome.SKIPPED
    assert failure.reason == "needs 3.00 MiB of memory, cpu-test has 2.00 MiB free for it"


@pytest.mark.parametrize(
    ("free_bytes", "outcome"), [(12_287, Outcome.SKIPPED), (12_288, Outcome.ERROR), (None, Outcome.ERROR)]
)
def test_memory_is_held_against_what_is_free_to_the_byte(free_bytes: int | None, outcome: Outcome) -> None:
    """32 x 32 in fp32 is 4 KiB, three times. What fits goes on to a clock that stands still."""
    spec = AttemptSpec(budget_s=1.0, iteration_limit_s=10.0, memory_free_bytes=free_bytes)
    assert failed(attempt(Gemm(m=32, n=32, k=32), spec, cpu_bench())).outcome is outcome


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        (
            {"flops": 500_000_000},
            "one iteration takes at least 500 ms (500 MFLOP at 1.00 GFLOP/s), the limit is 250 ms",
        ),
        ({"flops": 0, "nbytes": 2_000_000_000}, "takes at least 2.00 s (2.00 GB at 1.00 GB/s), the limit is 250 ms"),
        (
            {"flops": 300_000_000, "nbytes": 400_000_000},
            "takes at least 400 ms (400 MB at 1.00 GB/s), the limit is 250 ms",
        ),
    ],
)
def test_an_iteration_past_the_limit_skips_with_its_arithmetic(declared: dict[str, Any], reason: str) -> None:
    """At 1 GFLOP/s and 1 GB/s, the longer of the two."""
    failure = failed(attempt(Foreseen(never_built, **declared), SPEC, cpu_bench()))
    assert failure.outcome is Outcome.SKIPPED
    assert failure.reason.endswith(reason)


def test_an_iteration_at_the_limit_is_measured(control: Callable[[FakeClock], None]) -> None:
    clock = FakeClock()
    control(clock)
    measured(attempt(kernel(clock, 0.25, flops=250_000_000), SPEC, cpu_bench(clock)))


def test_the_data_sheet_gives_the_limits_where_there_is_one(gpu: Callable[..., Bench]) -> None:
    """989.5 TFLOP/s in bf16: 1e15 FLOP take 1.01 s; in fp32 67: 14.9 s."""
    bench = gpu(FakeClock(), hardware=H100)
    bf16 = failed(attempt(Foreseen(never_built, flops=1e15, dtype="bf16"), SPEC, bench))
    fp32 = failed(attempt(Foreseen(never_built, flops=1e15), SPEC, bench))
    assert "at least 1.01 s (1.00 PFLOP at 990 TFLOP/s)" in bf16.reason
    assert "at least 14.9 s (1.00 PFLOP at 67.0 TFLOP/s)" in fp32.reason
    assert bench.ceilings == {}


# What is wrong with a case


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_a_clock_that_cannot_be_believed_is_an_error(seconds: float) -> None:
    """A step that returns before its work is done shows as one that takes no time."""
    clock = FakeClock()
    failure = failed(attempt(kernel(clock, seconds, flops=1), SPEC, cpu_bench(clock)))
    assert failure.outcome is Outcome.ERROR
    assert "the clock ran backwards or stood still" in failure.reason


def test_the_users_own_exception_passes_and_precision_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    seen: list[str] = []

    def broken(device: str) -> Step:
        seen.append(torch.get_float32_matmul_precision())
        raise ZeroDivisionError("the user's own")

    try:
        with pytest.raises(ZeroDivisionError, match="the user's own"):
            attempt(Kernel(broken, flops=1), SPEC, cpu_bench())
        assert seen == ["highest"]
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("workload", "fill"), [(Launch(), "random"), (Kernel(matmul, flops=210), "own")], ids=["ours", "the user's"]
)
def test_what_the_inputs_hold_is_part_of_the_fingerprint(workload: Kernel | Launch, fill: str) -> None:
    """Zeros draw less power than random numbers and ran 13 % faster on an H200: the two are never compared."""
    spec = AttemptSpec(budget_s=0.02, iteration_limit_s=10.0)
    each = measured(attempt(workload, spec, cpu_bench(HostClock())))
    assert each.precision == {"float32_matmul": "highest", "fill": fill}


# What is wrong only later


def spoiled_later(clock: FakeClock, value: float) -> Step:
    """A step whose result is 1 for 15 calls and ``value`` from then on."""
    values = itertools.chain([1.0] * 15, itertools.repeat(value))

    def step() -> torch.Tensor:
        clock.advance(0.2)
        return torch.tensor([next(values)])

    return step


def test_a_step_that_yields_nan_later_is_an_error(control: Callable[[FakeClock], None]) -> None:
    clock = FakeClock()
    control(clock)
    later = Kernel(lambda device: spoiled_later(clock, math.nan), flops=1)
    failure = failed(attempt(later, SPEC, cpu_bench(clock)))
    assert failure.outcome is Outcome.ERROR
    assert failure.reason.startswith("after 10 samples: result holds NaN")


def test_a_step_that_leaves_its_reference_later_is_incorrect(control: Callable[[FakeClock], None]) -> None:
    clock = FakeClock()
    control(clock)
    later = Kernel(lambda device: (spoiled_later(clock, 2.0), lambda: torch.ones(1)), flops=1)
    failure = failed(attempt(later, SPEC, cpu_bench(clock)))
    assert failure.outcome is Outcome.INCORRECT
    assert failure.reason.startswith("after 10 samples: the step's result is not its reference's: ")


# What a case sets for its process


def setting(clock: FakeClock, setters: Mapping[int, Callable[[], object]]) -> Kernel:
    """A kernel whose build, as 0, and whose numbered calls, from 1, set something."""

    def build(device: str) -> Step:
        setters.get(0, lambda: None)()
        numbers = itertools.count(1)

        def step() -> None:
            setters.get(next(numbers), lambda: None)()
            clock.advance(0.002)

        return step

    return Kernel(build, flops=4_000_000, nbytes=1000)


def test_precision_is_recorded_as_the_build_left_it_and_ceilings_are_probed_without(
    monkeypatch: pytest.MonkeyPatch, control: Callable[[FakeClock], None]
) -> None:
    probed: list[str] = []

    def probe(dtype: str, device: str, clock: object) -> CeilingSample:
        probed.append(torch.get_float32_matmul_precision())
        return known(f"compute.{dtype}", 1e9)

    monkeypatch.setattr(ceiling, "probe_compute", probe)
    monkeypatch.setattr(ceiling, "probe_control", lambda control, **rest: known("compute.fp32", 1e8))
    clock = FakeClock()
    control(clock)
    bench = cpu_bench(clock)
    del bench.ceilings["compute.fp32"]
    lower = setting(clock, {0: lambda: torch.set_float32_matmul_precision("medium")})
    before = torch.get_float32_matmul_precision()
    assert measured(attempt(lower, SPEC, bench)).precision["float32_matmul"] == "medium"
    assert probed == ["highest"]
    assert torch.get_float32_matmul_precision() == before
    assert measured(attempt(setting(clock, {}), SPEC, bench)).precision["float32_matmul"] == "highest"


def test_precision_that_changes_while_it_is_measured_is_an_error(control: Callable[[FakeClock], None]) -> None:
    clock = FakeClock()
    control(clock)
    restless = setting(clock, {30: lambda: torch.set_float32_matmul_precision("high")})
    failure = failed(attempt(restless, SPEC, cpu_bench(clock)))
    assert failure.outcome is Outcome.ERROR
    assert failure.reason == (
        "the precision changed while the case was measured: float32_matmul was highest, then high; set it in build"
    )


def test_what_a_case_sets_holds_for_its_samples_and_not_for_the_next(control: Callable[[FakeClock], None]) -> None:
    clock, seen = FakeClock(), list[torch.dtype]()
    control(clock)
    look = {30: lambda: seen.append(torch.get_default_dtype())}
    wide = setting(clock, {0: lambda: torch.set_default_dtype(torch.float64), **look})
    for each in (wide, setting(clock, look)):
        measured(attempt(each, SPEC, cpu_bench(clock)))
    assert seen == [torch.float64, torch.float32]


# On a GPU


@dataclass
class Copies:
    """A kernel whose every build is a copy of its own; ``ran`` lists which of them ran."""

    clock: FakeClock
    built: int = 0
    ran: list[int] = field(default_factory=list)

    def build(self, device: str) -> Built:
        number = self.built
        self.built += 1

        def step() -> None:
            self.ran.append(number)
            self.clock.advance(0.001)

        return (step, lambda: None) if number % 2 else step


@pytest.mark.parametrize(
    ("l2_bytes", "nbytes", "copies"),
    [
        (50_000_000, 64_000_000, 4),  # 200 MB over 64 MB: 3.1
        (50_000_000, 100_000_000, 2),
        (50_000_000, 200_000_000, 1),
        (50_000_000, 1_000, MAX_COPIES),
        (None, 1_000, 1),
        (50_000_000, None, 1),
    ],
)
def test_copies_that_total_four_times_l2_take_turns(
    gpu: Callable[..., Bench], l2_bytes: int | None, nbytes: int | None, copies: int
) -> None:
    clock = FakeClock()
    kernels = Copies(clock)
    bench = gpu(clock, l2_bytes=l2_bytes, ceilings={key: known(key, 1e12) for key in ("compute.fp32", "memory")})
    measured(attempt(Kernel(kernels.build, flops=1000, nbytes=nbytes), SPEC, bench))
    assert kernels.built == copies
    turns = kernels.ran[-101:-1]  # the last call of all is the check after the samples
    assert turns == [(turns[0] + number) % copies for number in range(100)]


def test_on_a_cpu_nothing_takes_turns(control: Callable[[FakeClock], None]) -> None:
    kernels = Copies(FakeClock())
    control(kernels.clock)
    bench = cpu_bench(kernels.clock)
    bench.l2_bytes = 50_000_000
    measured(attempt(Kernel(kernels.build, flops=1000, nbytes=1000), SPEC, bench))
    assert kernels.built == 1


@pytest.mark.parametrize(("captured", "launch"), [(True, "graph"), (False, "eager")])
def test_the_copies_of_a_short_kernel_share_one_graph(
    monkeypatch: pytest.MonkeyPatch, gpu: Callable[..., Bench], captured: bool, launch: str
) -> None:
    """A graph of one copy alone would replay it out of L2 for ever; 52 steps in 52 ms are 1 ms each."""
    clock, copies = FakeClock(), list[int]()

    def capture(steps: Sequence[Step], count: int) -> Step:
        copies.append(len(steps))
        if not captured:
            raise NotCapturedError
        assert count == 52
        return lambda: clock.advance(0.052)

    monkeypatch.setattr(attempt_module, "capture", capture)
    kernels = Copies(clock)
    bench = gpu(clock, hardware=H100, l2_bytes=16_000_000)
    each = measured(attempt(Kernel(kernels.build, flops=0, nbytes=16_000_000), SPEC, bench))
    assert (each.launch, copies) == (launch, [4])
    if captured:
        assert each.time.median_s == pytest.approx(0.001)
    else:
        assert kernels.ran[-9:-1] == [(kernels.ran[-9] + number) % 4 for number in range(8)]


def test_a_gpu_has_a_data_sheet_instead_of_a_control(gpu: Callable[..., Bench]) -> None:
    """1 TFLOP in 2 ms: the judged value is ln of the rate itself."""
    clock = FakeClock()
    each = measured(
        attempt(kernel(clock, 0.002, flops=1e12, dtype="bf16"), SPEC, gpu(clock, hardware=H100, l2_bytes=50_000_000))
    )
    assert (each.control, each.ceilings, each.peak_memory_bytes) == (None, (), 4096)
    assert each.y == pytest.approx(math.log(5e14))
    assert each.precision["fill"] == "own"
    assert "reduced_precision_bf16" in each.precision


def test_a_throttled_gpu_makes_the_attempt_invalid_with_its_clocks(gpu: Callable[..., Bench]) -> None:
    reading = {"sm_clock_mhz": 900, "disturbed": "the GPU was held back: hw_thermal_slowdown"}
    clock = FakeClock()
    bench = gpu(clock, hardware=H100, read_device_conditions=lambda: dict(reading))
    each = measured(attempt(kernel(clock, 0.002, flops=1e12, dtype="bf16"), SPEC, bench))
    assert each.disturbed == "the GPU was held back: hw_thermal_slowdown"
    assert each.conditions["sm_clock_mhz"] == 900
    reading["disturbed"] = ""
    assert measured(attempt(kernel(clock, 0.002, flops=1e12, dtype="bf16"), SPEC, bench)).disturbed is None


def test_an_unlisted_gpu_is_probed_once_and_at_the_cases_precision(
    monkeypatch: pytest.MonkeyPatch, gpu: Callable[..., Bench]
) -> None:
    """A tf32 ceiling that was probed at IEEE precision is an eighth of the true one."""
    probed: list[str] = []

    def probe(dtype: str, device: str, clock: object) -> CeilingSample:
        probed.append(torch.get_float32_matmul_precision())
        return known(f"compute.{dtype}", 1e12)

    monkeypatch.setattr(ceiling, "probe_compute", probe)
    monkeypatch.setattr(ceiling, "probe_memory", lambda device, clock: known("memory", 1e12))
    clock = FakeClock()
    bench = gpu(clock)
    for _ in range(2):
        each = measured(attempt(kernel(clock, 0.002, flops=1e9, dtype="tf32"), SPEC, bench))
        assert each.ceilings == (known("compute.tf32", 1e12),)
    assert probed == ["high"]
    each = measured(attempt(kernel(clock, 0.002, flops=0, nbytes=1e6), SPEC, bench))
    assert each.ceilings == (known("memory", 1e12),)
