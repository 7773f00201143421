"""The state of a GPU at one moment, from NVML: clocks, power, temperature, throttling, other processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from perfsuite import units
from perfsuite.hardware.nvml import Nvml, bare_uuid, nvml_session

_CLOCK_SM, _CLOCK_MEMORY, _TEMPERATURE_GPU = 1, 2, 0
_POLICY_POWER, _POLICY_THERMAL = 0, 1

# NVML's bits of clock event (formerly throttle) reasons.
_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
# Power capping is how data-centre GPUs run; these are faults of the machine, and spoil an attempt.
SLOWDOWNS = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})

# The kernel gives the first PID namespace, the host's, this fixed inode number.
_HOST_PID_NAMESPACE = "pid:[4026531836]"


class NvmlConditions(msgspec.Struct, frozen=True, kw_only=True):
    """One reading; a field that NVML refused is None, and ``missing`` says why.

    The violation counters are nanoseconds since the driver started: the difference of two readings is the time that
    the GPU was held back between them.
    """

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    power_violation_ns: int | None = None
    thermal_violation_ns: int | None = None
    compute_processes: int | None = None
    foreign_processes: int | None = None
    missing: dict[str, str] = {}

    @property
    def slowdowns(self) -> tuple[str, ...]:
        """The throttle reasons that spoil a measurement."""
        return tuple(reason for reason in self.throttle_reasons or () if reason in SLOWDOWNS)


def read_nvml_conditions(uuid: str, *, own_pids: Collection[int] | None = None, library: Any = None) -> NvmlConditions:
    """Read the GPU or MIG slice ``uuid`` once; the UUID may lack its ``GPU-`` or ``MIG-``, as torch's do.

    ``own_pids`` are the processes whose contexts are expected on the device: this one unless given. A slice's clocks,
    power and temperature are those of its card.
    """
    own = frozenset({os.getpid()} if own_pids is None else own_pids)
    with nvml_session(library) as nvml:
        if isinstance(nvml, str):
            return _nothing(nvml)
        missing: dict[str, str] = {}
        handle = _handle(nvml, uuid, missing)
        if handle is None:
            return _nothing(missing["handle"])
        return _conditions(nvml, handle, own, missing)


def _nothing(reason: str) -> NvmlConditions:
    fields = (name for name in NvmlConditions.__struct_fields__ if name != "missing")
    return NvmlConditions(missing=dict.fromkeys(fields, reason))


def _handle(nvml: Nvml, uuid: str, missing: dict[str, str]) -> Any:
    """The handle of ``uuid``, tried as a GPU's and as a slice's: torch gives UUIDs without their prefix."""
    names = (f"{prefix}{bare_uuid(uuid)}".encode() for prefix in ("GPU-", "MIG-"))
    for name in names:
        handle = nvml.read(missing, "handle", functools.partial(_handle_by_uuid, name))
        if handle is not None:
            missing.pop("handle", None)
            return handle
    return None


def _handle_by_uuid(name: bytes, library: Any) -> Any:
    return library.nvmlDeviceGetHandleByUUID(name)


def _conditions(nvml: Nvml, handle: Any, own_pids: frozenset[int], missing: dict[str, str]) -> NvmlConditions:
    card = nvml.read({}, "card", lambda lib: lib.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)) or handle
    pids = nvml.read(missing, "compute_processes", lambda lib: lib.nvmlDeviceGetComputeRunningProcesses(handle))
    seen = None if pids is None else tuple(int(process.pid) for process in pids)
    return NvmlConditions(
        sm_clock_mhz=_clock(nvml, card, "sm_clock_mhz", nvml.constant("NVML_CLOCK_SM", _CLOCK_SM), missing),
        memory_clock_mhz=_clock(
            nvml, card, "memory_clock_mhz", nvml.constant("NVML_CLOCK_MEM", _CLOCK_MEMORY), missing
        ),
        power_w=nvml.read(missing, "power_w", lambda lib: lib.nvmlDeviceGetPowerUsage(card), kind=units.mw_to_w),
        temperature_c=nvml.read(
            missing,
            "temperature_c",
            lambda lib: lib.nvmlDeviceGetTemperature(card, _TEMPERATURE_GPU),
            kind=int,
        ),
        throttle_reasons=nvml.read(missing, "throttle_reasons", lambda lib: _reason_bits(lib, card), kind=_reasons),
        power_violation_ns=_violation(nvml, card, "power_violation_ns", _POLICY_POWER, missing),
        thermal_violation_ns=_violation(nvml, card, "thermal_violation_ns", _POLICY_THERMAL, missing),
        compute_processes=None if seen is None else len(seen),
        foreign_processes=_foreign(seen, own_pids, missing),
        missing=missing,
    )


def _clock(nvml: Nvml, card: Any, name: str, kind_of_clock: int, missing: dict[str, str]) -> int | None:
    value: int | None = nvml.read(missing, name, lambda lib: lib.nvmlDeviceGetClockInfo(card, kind_of_clock), kind=int)
    return value


def _violation(nvml: Nvml, card: Any, name: str, policy: int, missing: dict[str, str]) -> int | None:
    value: int | None = nvml.read(
        missing, name, lambda lib: int(lib.nvmlDeviceGetViolationStatus(card, policy).violationTime)
    )
    return value


def _reason_bits(library: Any, card: Any) -> int:
    """NVML renamed throttle reasons to event reasons; bindings and drivers know one name or both."""
    try:
        return int(library.nvmlDeviceGetCurrentClocksEventReasons(card))
    except (AttributeError, library.NVMLError):
        return int(library.nvmlDeviceGetCurrentClocksThrottleReasons(card))


def _reasons(bits: int) -> tuple[str, ...]:
    """The names of the bits that are set, lowest first; a bit without a name shows its value."""
    set_bits = (1 << position for position in range(bits.bit_length()) if bits >> position & 1)
    return tuple(_REASONS.get(bit, f"bit_{bit:#x}") for bit in set_bits)


def _foreign(seen: tuple[int, ...] | None, own_pids: frozenset[int], missing: dict[str, str]) -> int | None:
    """How many of the processes on the device are not ours.

    In a container NVML lists the host's process ids, among which ours cannot be told apart: then each of ours counts
    as one of those seen. Drivers that list none there leave the question open.
    """
    if seen is None:
        missing["foreign_processes"] = missing["compute_processes"]
        return None
    if own_pids.intersection(seen) or _in_host_pid_namespace():
        return len(set(seen) - own_pids)
    if not seen:
        missing["foreign_processes"] = "NVML lists no processes inside this container"
        return None
    return max(0, len(seen) - len(own_pids))


def _in_host_pid_namespace() -> bool:
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == _HOST_PID_NAMESPACE
    except OSError:
        return True
