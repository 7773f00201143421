"""``perfsuite doctor``: what of this machine can be used and trusted, with a remedy for what cannot."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer
from rich.text import Text

from perfsuite import units
from perfsuite.commands.console import facts, output
from perfsuite.errors import HardwareError
from perfsuite.hardware.catalogue import load
from perfsuite.hardware.device import Device, SystemView, cpu_device, gpu_devices
from perfsuite.hardware.selection import gather, unusable_gpu

Level = Literal["ok", "warn", "broken"]
BROKEN = 4
ROOT = Path("/")

HEAVY_STEAL = 0.01
_STYLES: Mapping[Level, str] = {"ok": "green", "warn": "yellow", "broken": "red"}
_STEAL_FIELD = 7
_TIME_FIELDS = 8
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Distribution, and what goes wrong when it is active in a run of cases.
_CONFLICTS = {
    "pytest-xdist": "cases run in one process: -n with --gpu or a --perf option is refused",
    "pytest-rerunfailures": "a rerun would undo a verdict: --reruns is refused",
    "pytest-retry": "a retry would undo a verdict: run cases with -p no:pytest-retry",
    "flaky": "a rerun would undo a verdict: run cases with -p no:flaky",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report; ``remedy`` says what to do unless all is well."""

    level: Level
    subject: str
    text: str
    remedy: str = ""


def doctor() -> None:
    """Check torch, NVML, GPUs, CPU and pytest plugins. Exit code 4 where something is broken."""
    findings = list(_findings())
    table = facts()
    for finding in findings:
        text = f"{finding.subject}: {finding.text}"
        table.add_row(
            Text(finding.level, style=_STYLES[finding.level]),
            f"{text}; {finding.remedy}" if finding.remedy else text,
        )
    output().print(table)
    if any(finding.level == "broken" for finding in findings):
        raise typer.Exit(BROKEN)


def _findings() -> Iterator[Finding]:
    try:
        view = gather(probe=True)
    except HardwareError as error:
        yield Finding(level="broken", subject="NVML", text=str(error))
    else:
        yield from machine_findings(view)
    yield from host_findings()
    yield from thread_findings(os.environ)
    yield from plugin_findings(_installed_plugins())


def machine_findings(view: SystemView) -> Iterator[Finding]:
    """torch, NVML, the GPUs and the CPU in ``view``."""
    yield _torch_finding(view)
    yield from _nvml_findings(view)
    yield from _gpu_findings(view)
    cpu = cpu_device(view.cpu)
    yield Finding(level="ok", subject="CPU", text=f"{cpu.sku}, {_memory(cpu)}")


def _torch_finding(view: SystemView) -> Finding:
    torch = view.torch
    if torch.version is None:
        text = torch.problem or "it did not answer"
        return Finding(level="broken", subject="torch", text=text, remedy="install torch")
    build = torch.runtime_version or "CPU only"
    return Finding(level="ok", subject="torch", text=f"{torch.version}, {build}")


def _nvml_findings(view: SystemView) -> Iterator[Finding]:
    nvml = view.nvml
    if nvml.problem is None:
        driver = nvml.driver_version or f"unknown ({nvml.missing.get('driver_version', 'not told')})"
        yield Finding(level="ok", subject="NVML", text=f"{len(nvml.gpus)} GPUs, driver {driver}")
    elif view.torch.backend == "cuda":
        remedy = "without it clocks, power and throttling are not recorded: make libnvidia-ml.so.1 loadable"
        yield Finding(level="warn", subject="NVML", text=nvml.problem, remedy=remedy)
    else:
        yield Finding(level="ok", subject="NVML", text=f"none; only NVIDIA GPUs need it ({nvml.problem})")
    for gpu in nvml.gpus:
        refused = ", ".join(f"{name} ({reason})" for name, reason in sorted(gpu.missing.items()))
        if refused:
            yield Finding(level="ok", subject=f"NVML GPU {gpu.index}", text=f"does not tell {refused}")


def _gpu_findings(view: SystemView) -> Iterator[Finding]:
    problem = unusable_gpu(view)
    if problem is not None:
        yield Finding(level="broken", subject="GPU", text=problem, remedy="or run with --gpu cpu")
    elif not view.torch.devices:
        yield Finding(level="ok", subject="GPU", text="none here; cases run on the CPU")
    for lost in view.torch.devices:
        if lost.problem is not None and problem is None:
            text = f"{lost.name} cannot be used: {lost.problem}"
            yield Finding(level="warn", subject=f"GPU {lost.index}", text=text, remedy="see what holds it")
    for device in gpu_devices(view, load()):
        yield _gpu_finding(device)


def _gpu_finding(device: Device) -> Finding:
    subject = f"GPU {device.index}"
    text = f"{device.name}, {device.sku}, {_memory(device)}"
    if device.known:
        return Finding(level="ok", subject=subject, text=text)
    remedy = "name it with --gpu" if device.candidates else "ceilings are measured, or add it to the catalogue"
    return Finding(level="warn", subject=subject, text=f"{text}: {device.unknown_reason}", remedy=remedy)


def _memory(device: Device) -> str:
    free = device.memory_free_bytes
    return "memory unknown" if free is None else f"{units.format_bytes(free)} of memory free"


def host_findings(root: Path = ROOT) -> Iterator[Finding]:
    """The CPU's governor and the time that a hypervisor took from this machine."""
    governors = {
        _text(path) for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    } - {""}
    if not governors:
        yield Finding(level="ok", subject="CPU governor", text="not visible, as in most virtual machines")
    elif governors == {"performance"}:
        yield Finding(level="ok", subject="CPU governor", text="performance")
    else:
        yield Finding(
            level="warn",
            subject="CPU governor",
            text=", ".join(sorted(governors)),
            remedy="clocks follow the load; steadier with: cpupower frequency-set -g performance",
        )
    yield _steal_finding(root)


def _steal_finding(root: Path) -> Finding:
    """The share of CPU time since boot that /proc/stat counts as stolen."""
    fields = _text(root / "proc/stat").partition("\n")[0].split()[1 : 1 + _TIME_FIELDS]
    ticks = [int(field) for field in fields if field.isdecimal()]
    if len(ticks) < _TIME_FIELDS or not sum(ticks):
        return Finding(level="ok", subject="CPU steal", text="this system does not tell")
    share = ticks[_STEAL_FIELD] / sum(ticks)
    text = f"{units.format_percent(share)} of CPU time since boot"
    if share < HEAVY_STEAL:
        return Finding(level="ok", subject="CPU steal", text=text)
    remedy = "other virtual machines take CPU time: expect INVALID attempts, or use a dedicated host"
    return Finding(level="warn", subject="CPU steal", text=text, remedy=remedy)


def thread_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Thread settings that a CPU run would take over from the environment."""
    given = {name: environment[name] for name in _THREAD_VARIABLES if environment.get(name)}
    shown = ", ".join(f"{name}={value}" for name, value in given.items()) or "none set"
    if set(given.values()) <= {"1"}:
        text = f"{shown}; CPU cases use one thread unless --perf-threads says otherwise"
        yield Finding(level="ok", subject="Threads", text=text)
    else:
        remedy = "CPU cases use --perf-threads (one unless given), not these"
        yield Finding(level="warn", subject="Threads", text=shown, remedy=remedy)


def plugin_findings(installed: Iterable[str]) -> Iterator[Finding]:
    """Installed pytest plugins that conflict with verdicts when they are active."""
    found = sorted(set(installed) & set(_CONFLICTS))
    for name in found:
        yield Finding(level="warn", subject=name, text="installed", remedy=_CONFLICTS[name])
    if not found:
        yield Finding(level="ok", subject="pytest plugins", text="none that conflicts")


def _installed_plugins() -> set[str]:
    """The distributions that bring a pytest plugin, by normalised name."""
    points = importlib.metadata.entry_points(group="pytest11")
    return {point.dist.name.lower().replace("_", "-") for point in points if point.dist is not None}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
