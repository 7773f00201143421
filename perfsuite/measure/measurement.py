"""What a worker measured in one attempt, in the form in which it travels to the coordinator."""

from __future__ import annotations

from typing import Any

import msgspec


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a measurement."""


class TimeSummary(_Part, frozen=True, kw_only=True):
    """Seconds of one step: the median, its interval and the number of samples behind it."""

    median_s: float
    low_s: float
    high_s: float
    samples: int


class ControlSummary(_Part, frozen=True, kw_only=True):
    """The control beside which the case was timed; ``rate_per_s`` is its median rate in ``unit`` per second."""

    name: str
    version: str
    unit: str
    rate_per_s: float


class CeilingSample(_Part, frozen=True, kw_only=True):
    """A measured rate that this attempt offers as a ceiling for cases of the same ``key``."""

    key: str
    rate_per_s: float
    unit: str
    detail: str


class Compilation(_Part, frozen=True, kw_only=True):
    """What ``torch.compile`` did before the first sample: seconds, graphs, and why any of it runs eagerly."""

    seconds: float
    graphs: int
    graph_breaks: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()


class Moved(_Part, frozen=True, kw_only=True):
    """The collective operation that a step is; ``nbytes`` is S as nccl-tests counts it."""

    operation: str
    nbytes: int
    in_place: bool


class RankSummary(_Part, frozen=True, kw_only=True):
    """One rank of a group: the number of its node, the median time by which it was done later than the first rank,
    per iteration, and in which share of the blocks it was the last one."""

    rank: int
    node: int
    late_s: float
    last_share: float


class GroupSummary(_Part, frozen=True, kw_only=True):
    """What ranks that measured together add: how their times were made one, and the median seconds between the first
    rank's end and the last one's, per iteration; ``scaling_efficiency`` is a fraction."""

    reduction: str
    skew_s: float
    ranks: tuple[RankSummary, ...]
    scaling_efficiency: float | None = None


class Overhead(_Part, frozen=True, kw_only=True):
    """Where the wall time of an attempt went, in seconds.

    ``build_s`` is all that comes before the first sample but warm-up: building, compiling and checking the step,
    counting FLOPs, the peak-memory pass, capturing graphs, making the control. The check after the last sample is in
    ``wall_s`` alone.
    """

    wall_s: float
    build_s: float
    warmup_s: float
    timed_s: float
    control_s: float
    sampling_wall_s: float


class Measurement(_Part, frozen=True, kw_only=True):
    """One attempt of one case: declared work as built, times, what is judged, and the conditions around it.

    ``y`` is ln(rate), less ln(control rate) where there is a control; ``durations_s`` are the samples of one step.
    """

    workload: dict[str, Any]
    dtype: str
    metric: str
    launch: str
    precision: dict[str, str | bool]
    flops: int
    flops_by_dtype: dict[str, int]
    flop_convention: str
    nbytes: int | None
    wire_bytes: int
    calls: int = 1
    tokens: int = 0
    hardware_flops: int | None = None
    flops_by_convention: dict[str, int] = {}
    time: TimeSummary
    y: float
    y_low: float
    y_high: float
    durations_s: tuple[float, ...]
    control: ControlSummary | None = None
    ceilings: tuple[CeilingSample, ...] = ()
    peak_memory_bytes: int | None = None
    predicted_memory_bytes: dict[str, int] = {}
    compilation: Compilation | None = None
    shares: dict[str, float] = {}
    moved: Moved | None = None
    group: GroupSummary | None = None
    disturbed: str | None = None
    conditions: dict[str, Any] = {}
    overhead: Overhead
    drill_percent: float = 0.0

    @property
    def ranks(self) -> int:
        """How many ranks measured together."""
        return len(self.group.ranks) if self.group is not None else 1
