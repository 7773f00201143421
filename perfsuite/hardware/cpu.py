"""The CPU of this machine: its model as a SKU, its memory, its clock."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perfsuite.hardware.names import slug

ROOT = Path("/")

# ARM's processors name no model in /proc/cpuinfo; these are the parts of cloud machines (ARM's MIDR part numbers).
_ARM_MODELS = {
    ("0x41", "0xd0c"): "ARM Neoverse-N1",
    ("0x41", "0xd40"): "ARM Neoverse-V1",
    ("0x41", "0xd49"): "ARM Neoverse-N2",
    ("0x41", "0xd4f"): "ARM Neoverse-V2",
}


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """This machine's CPU; ``missing`` says why a field is None. Memory is what this process's cgroup allows."""

    model: str
    identity: str
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    l2_bytes: int | None = None
    max_clock_mhz: float | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def sku(self) -> str:
        """``cpu-`` and the model's slug."""
        return f"cpu-{slug(self.model)}"


def read_cpu(root: Path = ROOT) -> Cpu:
    """Read the CPU from ``root``'s /proc and /sys, and from sysconf; fields that cannot be read are None."""
    fields = _cpuinfo(root)
    total, free = _memory(root)
    values: dict[str, int | None] = {
        "memory_total_bytes": total,
        "memory_free_bytes": free,
        "l2_bytes": _l2_bytes(root),
    }
    clock_mhz = _max_clock_mhz(root)
    missing = {name: "this system does not tell" for name, value in values.items() if value is None}
    if clock_mhz is None:
        missing["max_clock_mhz"] = "no cpufreq here, as in most virtual machines"
    model = _model(fields)
    return Cpu(model=model, identity=_identity(model, fields), max_clock_mhz=clock_mhz, missing=missing, **values)


def _cpuinfo(root: Path) -> dict[str, str]:
    """The fields of /proc/cpuinfo's first processor; empty where there is none."""
    fields: dict[str, str] = {}
    for line in _lines(root / "proc/cpuinfo"):
        if not line.strip() and fields:
            break
        name, colon, value = line.partition(":")
        if colon:
            fields[name.strip().lower()] = value.strip()
    return fields


def _model(fields: Mapping[str, str]) -> str:
    for name in ("model name", "cpu"):
        if fields.get(name):
            return fields[name]
    implementer, part = fields.get("cpu implementer"), fields.get("cpu part")
    if implementer and part:
        return _ARM_MODELS.get((implementer, part), f"ARM implementer {implementer} part {part}")
    return platform.processor() or platform.machine() or "unknown"


def _identity(model: str, fields: Mapping[str, str]) -> str:
    """What stands for a UUID: model and instruction-set flags, no host name."""
    flags = sorted(fields.get("flags", fields.get("features", "")).split())
    return hashlib.sha256(f"{model}\n{' '.join(flags)}".encode()).hexdigest()[:16]


def _memory(root: Path) -> tuple[int | None, int | None]:
    """Bytes in all and free, both cut to what the cgroups of this process allow."""
    total = _product(_sysconf("SC_PHYS_PAGES"), _sysconf("SC_PAGE_SIZE"))
    free = _available(root)
    if free is None:
        free = _product(_sysconf("SC_AVPHYS_PAGES"), _sysconf("SC_PAGE_SIZE"))
    for limit, used in _cgroup_limits(root):
        total = limit if total is None else min(total, limit)
        free = max(0, limit - used) if free is None else max(0, min(free, limit - used))
    return total, free


def _available(root: Path) -> int | None:
    """MemAvailable: what a new process can have without swapping, page cache included."""
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return _integer(value.split()[0], scale=1024)
    return None


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use in bytes of each limited cgroup (version 2) that this process is in; inactive files are not use."""
    own = next((line[3:].strip() for line in _lines(root / "proc/self/cgroup") if line.startswith("0::")), None)
    if own is None:
        return
    mount = root / "sys/fs/cgroup"
    place = mount / own.lstrip("/")
    for folder in (place, *place.parents):
        limit = _integer(_text(folder / "memory.max"))
        used = _integer(_text(folder / "memory.current"))
        if limit is not None and used is not None:
            yield limit, max(0, used - _inactive_file(folder))
        if folder == mount:
            return


def _inactive_file(folder: Path) -> int:
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return _integer(value) or 0
    return 0


def _l2_bytes(root: Path) -> int | None:
    """The level-2 cache of one core, which the kernel writes as ``2048K``."""
    kib = _integer(_text(root / "sys/devices/system/cpu/cpu0/cache/index2/size").removesuffix("K"), scale=1024)
    return _sysconf("SC_LEVEL2_CACHE_SIZE") if kib is None else kib


def _max_clock_mhz(root: Path) -> float | None:
    khz = _integer(_text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"))
    return None if khz is None else khz / 1e3


def _sysconf(name: str) -> int | None:
    """A value of sysconf, or None where this system does not know it or says 0."""
    if name not in getattr(os, "sysconf_names", {}):
        return None
    try:
        value = os.sysconf(name)
    except (OSError, ValueError):
        return None
    return value if value > 0 else None


def _product(pages: int | None, page_bytes: int | None) -> int | None:
    return None if pages is None or page_bytes is None else pages * page_bytes


def _integer(text: str, *, scale: int = 1) -> int | None:
    return int(text) * scale if text.strip().isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()
