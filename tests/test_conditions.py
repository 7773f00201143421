"""What is held and read around a measurement: host's counters, matmul precision, the process's settings, memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfsuite.measure.conditions import (
    HEAVY_STEAL,
    MIN_CLEAN_SHARE,
    HostSnapshot,
    host_conditions,
    host_disturbance,
    host_snapshot,
)
from perfsuite.measure.isolation import isolation
from perfsuite.measure.memory import peak_memory_bytes
from perfsuite.measure.precision import precision, precision_flags

STAT = "cpu  100 20 30 800 10 2 3 35 7 1\ncpu0 100 20 30 800 10 2 3 35 7 1\nintr 12345\n"
PRESSURE = """some avg10=0.31 avg60=0.72 avg300=0.55 total=4500000
full avg10=0.00 avg60=0.00 avg300=0.00 total=99
"""
NEEDED = 10

Write = Callable[..., Path]


@pytest.fixture
def proc(tmp_path: Path) -> Write:
    """A /proc with the given texts; None leaves the file out."""

    def write(*, stat: str | None = STAT, pressure: str | None = PRESSURE) -> Path:
        (tmp_path / "pressure").mkdir()
        for name, text in (("stat", stat), ("pressure/cpu", pressure)):
            if text is not None:
                (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path

    return write


def test_the_counters_of_a_usual_system(proc: Write) -> None:
    """Of the ten numbers the first eight are disjoint: guests' time is in user's. 100+20+30+800+10+2+3+35 = 1000."""
    assert host_snapshot(proc()) == HostSnapshot(cpu_stall_us=4_500_000, steal_ticks=35, total_ticks=1000)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "\n",
        "some avg10=0.00",
        "some avg10=0.00 total=",
        "some avg10=0.00 total=many",
        "some avg10=0.00 tötal=5",
    ],
)
def test_stalls_that_the_kernel_does_not_tell_are_not_known(proc: Write, text: str | None) -> None:
    assert host_snapshot(proc(pressure=text)) == HostSnapshot(cpu_stall_us=None, steal_ticks=35, total_ticks=1000)


@pytest.mark.parametrize("text", [None, "", "cpu", "cpu 1 2 3 4 5 6 7", "cpu 1 2 3 4 5 6 7 x", "cpü 1 2 3 4 5 6 7 8"])
def test_steal_that_the_kernel_does_not_tell_is_not_known(proc: Write, text: str | None) -> None:
    """Linux before 2.6.11 had seven numbers, without steal."""
    assert host_snapshot(proc(stat=text)) == HostSnapshot(cpu_stall_us=4_500_000, steal_ticks=None, total_ticks=None)


def test_a_system_without_proc_has_no_counters(tmp_path: Path) -> None:
    nothing = HostSnapshot(cpu_stall_us=None, steal_ticks=None, total_ticks=None)
    assert host_snapshot(tmp_path / "absent") == nothing
    conditions = host_conditions(nothing, nothing, wall_s=1.0)
    assert (conditions["cpu_stall_share"], conditions["steal_share"]) == (None, None)


def test_the_shares_between_two_snapshots() -> None:
    """0.1 s of stalls in 2 s; 30 of 400 ticks stolen."""
    before = HostSnapshot(cpu_stall_us=1_000_000, steal_ticks=10, total_ticks=1000)
    after = HostSnapshot(cpu_stall_us=1_100_000, steal_ticks=40, total_ticks=1400)
    conditions = host_conditions(before, after, wall_s=2.0)
    assert conditions["cpu_stall_share"] == pytest.approx(0.05)
    assert conditions["steal_share"] == pytest.approx(0.075)
    assert conditions["load_average"] >= 0


def test_no_time_between_two_snapshots_has_no_shares() -> None:
    same = HostSnapshot(cpu_stall_us=5, steal_ticks=1, total_ticks=10)
    conditions = host_conditions(same, same, wall_s=0.0)
    assert (conditions["cpu_stall_share"], conditions["steal_share"]) == (None, None)


def test_a_counter_that_one_snapshot_lacks_has_no_share() -> None:
    there = HostSnapshot(cpu_stall_us=5, steal_ticks=1, total_ticks=10)
    lacking = HostSnapshot(cpu_stall_us=None, steal_ticks=None, total_ticks=None)
    conditions = host_conditions(lacking, there, wall_s=1.0)
    assert (conditions["cpu_stall_share"], conditions["steal_share"]) == (None, None)


@pytest.mark.parametrize("share", [None, 0.0, HEAVY_STEAL])
def test_some_steal_is_normal(share: float | None) -> None:
    assert host_disturbance({"steal_share": share}, kept=20, dropped=0, needed=NEEDED) is None
    assert host_disturbance({}, kept=20, dropped=0, needed=NEEDED) is None


def test_heavy_steal_spoils_an_attempt() -> None:
    reason = host_disturbance({"steal_share": HEAVY_STEAL + 0.01}, kept=20, dropped=0, needed=NEEDED)
    assert reason == f"the hypervisor took {HEAVY_STEAL + 0.01:.0%} of the CPU time"
    assert HEAVY_STEAL < 0.5


@pytest.mark.parametrize(
    ("kept", "dropped", "spoiled"),
    [
        (NEEDED, 0, False),
        (NEEDED, 40, False),  # 10 of 50 are the fifth that is needed
        (NEEDED, 41, True),
        (NEEDED - 1, 1, True),
        (0, 200, True),
    ],
)
def test_too_few_samples_left_spoil_an_attempt(kept: int, dropped: int, spoiled: bool) -> None:
    assert MIN_CLEAN_SHARE == 0.2
    reason = host_disturbance({}, kept=kept, dropped=dropped, needed=NEEDED)
    expected = f"other processes interrupted {dropped} of {kept + dropped} samples"
    assert reason == (expected if spoiled else None)


def test_too_few_samples_without_a_dropped_one_left_no_time() -> None:
    reason = host_disturbance({}, kept=3, dropped=0, needed=NEEDED)
    assert reason == "other processes left time for only 3 of 10 samples"


# Matmul precision


def flags_in_force() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.fixture(params=[("highest", False), ("medium", True)], ids=["all off", "all on"])
def before(request: pytest.FixtureRequest) -> Iterator[tuple[str, bool]]:
    """The user's own flags, and after the test those of the process."""
    own = flags_in_force()
    set_flags(*request.param)
    yield request.param
    set_flags(*own)


def set_flags(matmul: str, cudnn: bool) -> None:
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.mark.parametrize(
    ("dtype", "matmul", "cudnn"), [("fp32", "highest", False), ("tf32", "high", True), ("bf16", "highest", False)]
)
def test_precision_is_the_cases_and_put_back_after(
    before: tuple[str, bool], dtype: str, matmul: str, cudnn: bool
) -> None:
    """IEEE for fp32 also in convolutions, where torch's default is TF32."""
    with precision(dtype):
        assert flags_in_force() == (matmul, cudnn)
        assert precision_flags("cpu") == {"float32_matmul": matmul}
    assert flags_in_force() == before


def test_precision_is_put_back_after_an_exception(before: tuple[str, bool]) -> None:
    with pytest.raises(KeyboardInterrupt), precision("tf32"):
        raise KeyboardInterrupt
    assert flags_in_force() == before


@pytest.mark.parametrize("backend", ["cuda", "rocm"])
@pytest.mark.parametrize("value", [True, False])
def test_reduced_precision_and_fast_accumulation_are_recorded_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, backend: str, value: bool
) -> None:
    matmul = SimpleNamespace(
        allow_fp16_reduced_precision_reduction=value,
        allow_bf16_reduced_precision_reduction=not value,
        allow_fp16_accumulation=value,
    )
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    with precision("fp16"):
        assert precision_flags(backend) == {
            "float32_matmul": "highest",
            "reduced_precision_fp16": value,
            "reduced_precision_bf16": not value,
            "accumulation_fp16": value,
        }


def test_precision_that_torch_will_not_name_is_mixed(before: tuple[str, bool]) -> None:
    """Its newer interface says more than the older one has words for."""
    mkldnn: Any = torch.backends.mkldnn
    own = mkldnn.matmul.fp32_precision
    with isolation(), precision("fp32"):
        mkldnn.matmul.fp32_precision = "bf16"
        assert precision_flags("cpu") == {"float32_matmul": "mixed"}
        mkldnn.matmul.fp32_precision = own
    assert flags_in_force() == before


# What a case sets for its process

BACKENDS = torch.backends
READ: dict[str, Callable[[], Any]] = {
    "threads": torch.get_num_threads,
    "data type": torch.get_default_dtype,
    "device": torch.get_default_device,
    "gradients": torch.is_grad_enabled,
    "determinism": torch.are_deterministic_algorithms_enabled,
    "precision": torch.get_float32_matmul_precision,
    "convolutions": lambda: BACKENDS.cudnn.allow_tf32,
    "autotuning": lambda: BACKENDS.cudnn.benchmark,
    "reduction": lambda: BACKENDS.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "folder": os.getcwd,
    "clock": lambda: time.perf_counter_ns,
}


def set_everything_and_leave(folder: Path) -> None:
    """As the worst of cases does."""
    before = {name: read() for name, read in READ.items()}
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    BACKENDS.cudnn.allow_tf32 = not BACKENDS.cudnn.allow_tf32
    BACKENDS.cudnn.benchmark = True
    matmul = BACKENDS.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = not matmul.allow_bf16_reduced_precision_reduction
    os.chdir(folder)
    time.perf_counter_ns = lambda: 0
    assert [name for name, read in READ.items() if read() == before[name]] == []
    raise KeyboardInterrupt


def test_what_a_case_sets_for_its_process_is_put_back_after_an_exception(tmp_path: Path) -> None:
    before = {name: read() for name, read in READ.items()}
    with pytest.raises(KeyboardInterrupt), isolation():
        set_everything_and_leave(tmp_path)
    assert {name: read() for name, read in READ.items()} == before


def test_a_default_device_named_cpu_does_not_stay() -> None:
    """torch looks at every call for as long as a default has been named."""
    with isolation():
        torch.set_default_device("cpu")
    calls: list[str] = []
    sys.setprofile(lambda frame, event, argument: calls.append(frame.f_code.co_name))
    torch.ones(1)
    sys.setprofile(None)
    assert "__torch_function__" not in calls


def test_a_folder_that_was_gone_before_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with isolation():
        os.chdir(tmp_path)
    assert Path.cwd() == tmp_path


# Peak memory

KIB = torch.ones(256)
"""1024 bytes."""
KEPT: list[torch.Tensor] = []


def two_at_once() -> torch.Tensor:
    """3 KiB at the peak: the second is made while the first lives, the third after it is gone."""
    first = torch.cat([KIB, KIB])
    second = torch.neg(KIB)
    del first
    return torch.cat([second, second])


def leaves_one_behind() -> None:
    KEPT.append(torch.neg(KIB))


@pytest.mark.parametrize(
    ("step", "nbytes"),
    [
        (lambda: torch.neg(KIB), 1024),
        (lambda: torch.neg(torch.neg(KIB)), 2048),
        (lambda: torch.neg(KIB, out=torch.empty(256)), 1024),
        (lambda: [torch.neg(KIB) for _ in range(5)], 5 * 1024),
        (two_at_once, 3 * 1024),
        (leaves_one_behind, 1024),
        (KIB.neg_, 0),
        (lambda: None, 0),
    ],
    ids=["one", "in turn", "out", "list", "freed", "kept", "in place", "nothing"],
)
def test_the_peak_memory_of_known_steps(step: Callable[[], object], nbytes: int) -> None:
    assert peak_memory_bytes(step, "cpu") == nbytes


def test_what_only_a_first_step_allocates_is_no_part_of_the_peak() -> None:
    state: dict[str, torch.Tensor] = {}

    def step() -> torch.Tensor:
        state.setdefault("momentum", torch.cat([KIB] * 50) if not state else KIB)
        return torch.neg(KIB)

    assert peak_memory_bytes(step, "cpu") == 1024


@pytest.mark.parametrize("backend", ["cuda", "rocm", "xpu"])
def test_on_a_gpu_the_allocator_tells_the_peak(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    log: list[str] = []
    module = SimpleNamespace(
        reset_peak_memory_stats=lambda: log.append("reset"),
        synchronize=lambda: log.append("synchronize"),
        max_memory_allocated=lambda: 4096,
    )
    monkeypatch.setattr(torch, "xpu" if backend == "xpu" else "cuda", module)
    assert peak_memory_bytes(lambda: log.append("step"), backend) == 4096
    assert log == ["reset", "step", "synchronize"]
