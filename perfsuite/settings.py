"""Options, ini settings and markers: declared in one table, validated once, frozen."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.errors import UsageError

GPU_FLAG, GPU_DEST = "--gpu", "perfsuite_gpu"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One ``--perf-*`` option: its ini setting is the same name with underscores; ``parse`` is None for a flag."""

    flag: str
    help: str
    parse: Callable[[str, str], Any] | None = None
    default: Any = None
    metavar: str | None = None

    @property
    def dest(self) -> str:
        """The ini setting, and the attribute of Settings less its prefix."""
        return self.flag.removeprefix("--").replace("-", "_")


def _number(name: str, text: str) -> float:
    """A finite number; ``3%`` is 0.03."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number") from None
    if not math.isfinite(value):
        raise UsageError(f"{name}={text!r} must be finite")
    return value


def _positive(name: str, text: str) -> float:
    value = _number(name, text)
    if value <= 0:
        raise UsageError(f"{name}={text!r} must be greater than 0")
    return value


def _not_negative(name: str, text: str) -> float:
    value = _number(name, text)
    if value < 0:
        raise UsageError(f"{name}={text!r} must not be negative")
    return value


def _fraction(name: str, text: str) -> float:
    value = _number(name, text)
    if not 0 < value < 1:
        raise UsageError(f"{name}={text!r} must lie between 0 and 1 (0.03 or 3% for three per cent)")
    return value


def _count(name: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a whole number") from None
    if value < 1:
        raise UsageError(f"{name}={text!r} must be at least 1")
    return value


def _reason(name: str, text: str) -> str:
    if not text.strip():
        raise UsageError(f'{name} needs a reason, for example {name} "cuBLAS 13 is slower here, accepted"')
    return " ".join(text.split())


def _text(name: str, text: str) -> str:
    if not text.strip():
        raise UsageError(f"{name} must not be empty")
    return text


OPTIONS = (
    Option(flag="--perf-strict", help="fail INVALID and INCONCLUSIVE cases too"),
    Option(flag="--perf-require-baseline", help="fail cases that have no baseline row"),
    Option(flag="--perf-update-baselines", help="measure in fresh processes and store clean results as baselines"),
    Option(flag="--perf-accept", help="why a baseline may get worse; kept in its row", parse=_reason, metavar="REASON"),
    Option(flag="--perf-runs", help="fresh processes per baseline row (3)", parse=_count, default=3, metavar="K"),
    Option(flag="--perf-tolerance", help="allowed loss of rate, 0.03 or 3%%", parse=_fraction, metavar="T"),
    Option(flag="--perf-budget", help="seconds of sampling per case (1)", parse=_positive, default=1.0, metavar="S"),
    Option(
        flag="--perf-timeout",
        help="seconds after which a case hangs (120)",
        parse=_positive,
        default=120.0,
        metavar="S",
    ),
    Option(
        flag="--perf-session-timeout",
        help="seconds after which nothing is measured any more",
        parse=_positive,
        metavar="S",
    ),
    Option(flag="--perf-plan", help="print each case's FLOPs, bytes, bound and roofline time; measure nothing"),
    Option(
        flag="--perf-drill",
        help="add work worth PERCENT of the step's time",
        parse=_not_negative,
        default=0.0,
        metavar="PERCENT",
    ),
    Option(
        flag="--perf-ranks", help="ranks of cases marked ranks='all' (every GPU; 1 on a CPU)", parse=_count, metavar="N"
    ),
    Option(
        flag="--perf-rank-timeout",
        help="seconds without a sign of life after which ranks hang (60)",
        parse=_positive,
        default=60.0,
        metavar="S",
    ),
    Option(
        flag="--perf-network",
        help="a node's network bandwidth, GB/s in each direction, that collectives of many nodes are held against",
        parse=_positive,
        metavar="GB/S",
    ),
    Option(flag="--perf-threads", help="CPU threads of case and control (1)", parse=_count, default=1, metavar="N"),
    Option(flag="--perf-in-process", help="measure without workers, for debuggers and profilers"),
    Option(
        flag="--perf-baselines",
        help="folder of baselines (baselines/)",
        parse=_text,
        default="baselines",
        metavar="DIR",
    ),
    Option(flag="--perf-report", help="folder of this run's results (reports/<time>/)", parse=_text, metavar="DIR"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a session was asked for: times in seconds, the tolerance a fraction, the drill a percentage, the network in
    GB/s."""

    gpu: str
    strict: bool
    require_baseline: bool
    update_baselines: bool
    accept: str | None
    runs: int
    tolerance: float | None
    budget: float
    timeout: float
    session_timeout: float | None
    plan: bool
    drill: float
    ranks: int | None
    rank_timeout: float
    network: float | None
    threads: int
    in_process: bool
    baselines: Path
    report: Path | None


def validate(
    gpu: str,
    *,
    given: Mapping[str, str | bool | None],
    ini: Mapping[str, str | bool | None],
    directory: Path,
    root: Path,
) -> Settings:
    """Settings from the command line (paths relative to ``directory``), else from ini (paths relative to ``root``).

    Raises UsageError for a value that cannot be used and for options that exclude each other.
    """
    values = {option.dest.removeprefix("perf_"): _value(option, given, ini) for option in OPTIONS}
    for name in ("baselines", "report"):
        if values[name] is not None:
            values[name] = (directory if given.get(f"--perf-{name}") else root) / values[name]
    settings = Settings(gpu=gpu, **values)
    _refuse_contradictions(settings)
    return settings


def _value(option: Option, given: Mapping[str, str | bool | None], ini: Mapping[str, str | bool | None]) -> Any:
    """One option's value: the command line, else ini, else the default."""
    if option.parse is None:
        return bool(given.get(option.flag) or ini.get(option.dest))
    for name, raw in ((option.flag, given.get(option.flag)), (option.dest, ini.get(option.dest))):
        if raw is not None:
            return option.parse(name, str(raw))
    return option.default


def _refuse_contradictions(settings: Settings) -> None:
    """Options that cannot go together."""
    if settings.update_baselines and settings.drill:
        raise UsageError("--perf-drill with --perf-update-baselines: a drill is never a baseline; leave one out")
    if settings.update_baselines and settings.in_process:
        raise UsageError(
            "--perf-in-process with --perf-update-baselines: baselines need fresh processes; leave one out"
        )
    if settings.accept is not None and not settings.update_baselines:
        raise UsageError("--perf-accept goes with --perf-update-baselines")
    if settings.in_process and (settings.ranks or 1) > 1:
        raise UsageError(
            f"--perf-in-process with --perf-ranks {settings.ranks}: one process is one rank; leave one out"
        )


def gpu_name(given: str | None, ini: str | None) -> str:
    """The hardware that is asked for: the command line's word, else ini's, else ``auto``; a UsageError if empty."""
    for name, text in ((GPU_FLAG, given), ("perf_gpu", ini)):
        if text is not None:
            return _text(name, text)
    return "auto"


def available_ranks(settings: Settings, *, devices: int | None) -> int:
    """How many ranks there can be: as many as are asked for, else one a device; None devices: a CPU, with one."""
    if settings.ranks is None:
        return 1 if settings.in_process else devices or 1
    if devices is not None and settings.ranks > devices:
        raise UsageError(f"--perf-ranks {settings.ranks}: here are {devices} devices of this kind, one for each rank")
    return settings.ranks


def torchrun_ranks(settings: Settings, started: int) -> int:
    """How many of the ranks that a user's torchrun has started measure together."""
    if settings.in_process:
        raise UsageError("--perf-in-process under torchrun: one process is one rank; leave one out")
    if (settings.ranks or started) > started:
        raise UsageError(f"--perf-ranks {settings.ranks}: torchrun has started {started}")
    return settings.ranks or started


MARKER_ARGUMENTS = ("tolerance", "floor", "budget_s", "timeout_s", "sweep", "ranks")
ALL_RANKS = "all"


@dataclass(frozen=True, kw_only=True)
class CaseSettings:
    """What a case's ``perf`` markers say; None where they leave it to the session."""

    tolerance: float | None = None
    floor: float | None = None
    budget_s: float | None = None
    timeout_s: float | None = None
    sweep: str | None = None
    ranks: int | str | None = None
    """How many ranks measure the case: a number, ``all`` that there are, or None for one that needs no others."""


def case_settings(case: str, arguments: Mapping[str, object], *, sku: str, family: str) -> CaseSettings:
    """The ``perf`` marker's arguments for one device; a UsageError that names the case and the argument otherwise."""
    unknown = sorted(set(arguments) - set(MARKER_ARGUMENTS))
    if unknown:
        raise UsageError(
            f"{case}: perf({unknown[0]}=...) is not an argument of the marker; it takes {', '.join(MARKER_ARGUMENTS)}"
        )
    return CaseSettings(
        tolerance=_for_device(case, "tolerance", arguments.get("tolerance"), sku, family),
        floor=_for_device(case, "floor", arguments.get("floor"), sku, family),
        budget_s=_marker_number(case, "budget_s", arguments.get("budget_s")),
        timeout_s=_marker_number(case, "timeout_s", arguments.get("timeout_s")),
        sweep=_marker_name(case, "sweep", arguments.get("sweep")),
        ranks=_marker_ranks(case, arguments.get("ranks")),
    )


def _for_device(case: str, name: str, value: object, sku: str, family: str) -> float | None:
    """A fraction, or the one for this SKU or family out of a dict; None where the dict says nothing of this device."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            _marker_fraction(case, f"{name}[{key!r}]", each)
        value = value.get(sku, value.get(family))
    return None if value is None else _marker_fraction(case, name, value)


def _marker_fraction(case: str, name: str, value: object) -> float:
    number = _marker_number(case, name, value)
    if number is None or number >= 1:
        raise UsageError(f"{case}: perf({name}={value!r}) must lie between 0 and 1")
    return number


def _marker_number(case: str, name: str, value: object) -> float | None:
    if value is None:
        return None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 < number < sys.float_info.max:
        raise UsageError(f"{case}: perf({name}={value!r}) must be a number greater than 0")
    return float(number)


def _marker_name(case: str, name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.isidentifier():
        raise UsageError(f"{case}: perf({name}={value!r}) must be the name of one of the case's arguments")
    return value


def _marker_ranks(case: str, value: object) -> int | str | None:
    if value is None or value == ALL_RANKS:
        return ALL_RANKS if value is not None else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{case}: perf(ranks={value!r}) must be a whole number of at least 1, or {ALL_RANKS!r}")
    return value
