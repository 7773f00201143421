"""What torch sees: the message of a child process, so that this process never imports torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

PROBE_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 5.0

# The child finds this very perfsuite, last on its path so that it shadows nothing, and not what lies in the working
# folder (-P): a torch.py or random.py there is not ours to run.
_MAIN = "import runpy, sys; sys.path.append(sys.argv.pop()); runpy.run_module({!r}, run_name='__main__')"
_PROBE = (
    sys.executable,
    "-P",
    "-c",
    _MAIN.format("perfsuite.hardware.probe"),
    str(Path(__file__).parents[2]),
)


class TorchDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device of torch; ``problem`` says why it cannot be used, ``missing`` why a field is None."""

    index: int
    name: str
    uuid: str | None = None
    pci_address: str | None = None
    compute_capability: str | None = None
    sm_count: int | None = None
    l2_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    max_clock_mhz: float | None = None
    driver_version: str | None = None
    problem: str | None = None
    missing: dict[str, str] = {}


class TorchReport(msgspec.Struct, frozen=True, kw_only=True):
    """torch's version and devices; ``problem`` says why there are none."""

    version: str | None = None
    backend: Literal["cuda", "rocm", "xpu", "cpu"] = "cpu"
    runtime_version: str | None = None
    hidden_by: str | None = None
    devices: tuple[TorchDevice, ...] = ()
    problem: str | None = None

    @property
    def usable(self) -> tuple[TorchDevice, ...]:
        """The devices on which work can run."""
        return tuple(device for device in self.devices if device.problem is None)


def run_probe(*, command: Sequence[str] = _PROBE, timeout_s: float = PROBE_TIMEOUT_S) -> TorchReport:
    """Ask a child process what torch sees; a crash or time-out of the child is a report without devices."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        output, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(child)
        return TorchReport(problem=f"the torch probe did not answer within {timeout_s:g} s")
    return _parse(output) or TorchReport(problem=_failure(child.returncode, errors))


def _end(child: subprocess.Popen[str]) -> None:
    """Kill the child; one that hangs in a driver call is left to the kernel after a bounded wait."""
    child.kill()
    try:
        child.communicate(timeout=_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return


def _parse(output: str) -> TorchReport | None:
    """The report in the child's output, whatever a library printed before it."""
    for line in reversed(output.splitlines()):
        try:
            return msgspec.json.decode(line, type=TorchReport)
        except msgspec.DecodeError:
            continue
    return None


def _failure(returncode: int, errors: str) -> str:
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no message")
    return f"the torch probe ended with {returncode}: {last}"
