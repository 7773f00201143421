"""What happened on the host beside the samples: stalls for the CPU (PSI), time stolen by the hypervisor, load."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.units import format_time_us, ns_to_s, s_to_us

HEAVY_STEAL = 0.30
"""An attempt during which more of this machine's time than this was stolen says nothing about the code."""
MIN_CLEAN_SHARE = 0.2
"""Fewer undisturbed pairs than this share of all, and the attempt is not to be believed."""


@dataclass(frozen=True, kw_only=True)
class HostSnapshot:
    """Counters of the host at one moment; None where the system does not keep them."""

    cpu_stall_us: int | None
    steal_ticks: int | None
    total_ticks: int | None


def host_snapshot(proc: Path = Path("/proc")) -> HostSnapshot:
    """Read the counters."""
    steal, total = _ticks(proc / "stat")
    return HostSnapshot(cpu_stall_us=_stall_us(proc / "pressure" / "cpu"), steal_ticks=steal, total_ticks=total)


def host_conditions(before: HostSnapshot, after: HostSnapshot, wall_s: float) -> dict[str, Any]:
    """The shares between two snapshots: of wall time stalled for a CPU, of CPU time stolen; and the load."""
    return {
        "cpu_stall_share": _share(before.cpu_stall_us, after.cpu_stall_us, wall_s * 1e6),
        "steal_share": _share(
            before.steal_ticks, after.steal_ticks, (after.total_ticks or 0) - (before.total_ticks or 0)
        ),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _share(before: int | None, after: int | None, whole: float) -> float | None:
    """(after - before) / whole, rounded; None where it cannot be known."""
    if before is None or after is None or whole <= 0:
        return None
    return round((after - before) / whole, 4)


def _stall_us(path: Path) -> int | None:
    """Microseconds in which some task waited for a CPU, from PSI."""
    try:
        some = path.read_text(encoding="ascii").splitlines()[0]
        return int(some.rsplit("total=", 1)[1])
    except (OSError, IndexError, ValueError):
        return None


def _ticks(path: Path) -> tuple[int | None, int | None]:
    """Stolen ticks and all ticks since boot."""
    try:
        fields = [int(field) for field in path.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
        return fields[7], sum(fields)
    except (OSError, IndexError, ValueError):
        return None, None


def device_conditions(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A GPU's state after the samples, and what spoiled them at either end or, by its counters, in between."""
    reasons = [str(each["disturbed"]) for each in (before, after) if each.get("disturbed")]
    held_ns = (after.get("thermal_violation_ns") or 0) - (before.get("thermal_violation_ns") or 0)
    if held_ns > 0:
        reasons.append(f"the GPU was too hot for {format_time_us(s_to_us(ns_to_s(held_ns)))}")
    return {**after, "disturbed": "; ".join(dict.fromkeys(reasons)) or None}


def host_disturbance(conditions: dict[str, Any], *, kept: int, dropped: int, needed: int) -> str | None:
    """Why an attempt on a CPU does not count; None where it does."""
    steal = conditions.get("steal_share")
    if steal is not None and steal > HEAVY_STEAL:
        return f"the hypervisor took {steal:.0%} of the CPU time"
    if kept < needed and not dropped:
        return f"other processes left time for only {kept} of {needed} samples"
    if kept < needed or kept < MIN_CLEAN_SHARE * (kept + dropped):
        return f"other processes interrupted {dropped} of {kept + dropped} samples"
    return None
