"""The child process that imports torch and prints one line of JSON: ``python -m perfsuite.hardware.probe``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from perfsuite.hardware.names import text_of
from perfsuite.hardware.torch_report import TorchDevice, TorchReport

Backend = Literal["cuda", "rocm", "xpu", "cpu"]
T = TypeVar("T")

_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_AMDGPU_VERSION = Path("/sys/module/amdgpu/version")


def report(torch: Any, environment: Mapping[str, str]) -> TorchReport:
    """What ``torch`` (the module) sees under ``environment``."""
    backend = _backend(torch)
    build = _build(torch)
    common = TorchReport(
        version=str(torch.__version__),
        backend=backend,
        runtime_version=None if build is None else f"{build[0]} {build[1]}",
        hidden_by=_hidden_by(environment),
    )
    if backend == "cpu":
        return msgspec.structs.replace(common, problem=_why_none(torch, build))
    api = torch.xpu if backend == "xpu" else torch.cuda
    devices = tuple(_device(api, backend, index) for index in range(api.device_count()))
    return msgspec.structs.replace(common, devices=devices)


def _backend(torch: Any) -> Backend:
    if torch.cuda.is_available():
        return "rocm" if torch.version.hip else "cuda"
    xpu = getattr(torch, "xpu", None)
    return "xpu" if xpu is not None and xpu.is_available() else "cpu"


def _build(torch: Any) -> tuple[str, str] | None:
    """Which accelerator this torch is built for, and the version of its runtime."""
    for name, label in (("hip", "ROCm"), ("cuda", "CUDA"), ("xpu", "XPU")):
        version = getattr(torch.version, name, None)
        if version:
            return label, str(version)
    return None


def _why_none(torch: Any, build: tuple[str, str] | None) -> str:
    if build is None:
        return "it is built without CUDA, ROCm or XPU"
    if build[0] == "XPU":
        return "its XPU runtime finds no device"
    try:
        torch.cuda.init()
    except Exception as error:  # torch raises RuntimeError, AssertionError and its own kinds here
        return _first_line(error)
    return f"its {build[0]} runtime finds no device"


def _hidden_by(environment: Mapping[str, str]) -> str | None:
    """The setting that hides every device, as ``CUDA_VISIBLE_DEVICES=-1`` does."""
    for name in _HIDING:
        value = environment.get(name)
        if value is not None and (not value.strip() or value.strip().startswith("-1")):
            return f"{name}={value.strip()!r}"
    return None


def _device(api: Any, backend: Backend, index: int) -> TorchDevice:
    missing: dict[str, str] = {}
    problem = None
    try:
        properties = api.get_device_properties(index)
    except Exception as error:  # a device that is listed but lost raises whatever its driver says
        return TorchDevice(index=index, name=f"device {index}", problem=_first_line(error))
    try:
        free_bytes, total_bytes = api.mem_get_info(index)
    except Exception as error:  # exclusive or failed devices refuse the context that this call needs
        free_bytes, total_bytes = None, getattr(properties, "total_memory", None)
        problem = None if backend == "xpu" else _first_line(error)
        missing["memory_free_bytes"] = _first_line(error)
    clock_khz = _value(properties, "clock_rate", float, missing, "max_clock_mhz")
    return TorchDevice(
        index=index,
        name=text_of(properties.name),
        uuid=_value(properties, "uuid", str, missing),
        pci_address=_pci_address(properties),
        compute_capability=_compute_capability(properties, backend),
        sm_count=_value(properties, _units_name(backend), int, missing, "sm_count"),
        l2_bytes=_value(properties, _l2_name(backend), int, missing, "l2_bytes"),
        memory_total_bytes=total_bytes,
        memory_free_bytes=free_bytes,
        max_clock_mhz=None if clock_khz is None else clock_khz / 1e3,
        driver_version=_driver_version(properties, backend, missing),
        problem=problem,
        missing=missing,
    )


def _value(
    properties: Any, name: str, kind: Callable[[Any], T], missing: dict[str, str], field: str | None = None
) -> T | None:
    """A property as ``kind``; where torch has none or 0, None and a reason under ``field``."""
    value = getattr(properties, name, None)
    if not value:
        missing[field or name] = f"this torch has no {name} of the device"
        return None
    return kind(value)


def _units_name(backend: Backend) -> str:
    return "max_compute_units" if backend == "xpu" else "multi_processor_count"


def _l2_name(backend: Backend) -> str:
    return "last_level_cache_size" if backend == "xpu" else "L2_cache_size"


def _pci_address(properties: Any) -> str | None:
    """``0000:07:00.0``, where torch tells; its ``pci_device_id`` is the slot, not the product."""
    parts = tuple(getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    if not all(isinstance(part, int) for part in parts):
        return None
    domain, bus, slot = parts
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def _compute_capability(properties: Any, backend: Backend) -> str | None:
    if backend == "cuda":
        return f"{properties.major}.{properties.minor}"
    if backend == "rocm":
        return text_of(properties.gcnArchName).split(":")[0]
    return None


def _driver_version(properties: Any, backend: Backend, missing: dict[str, str]) -> str | None:
    """The driver's version, except for CUDA, where NVML tells it."""
    if backend == "cuda":
        return None
    if backend == "xpu":
        return _value(properties, "driver_version", text_of, missing)
    try:
        return _AMDGPU_VERSION.read_text(encoding="ascii").strip()
    except OSError:
        missing["driver_version"] = f"the kernel has no {_AMDGPU_VERSION}"
        return None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def main() -> None:
    """Print the report of this process's torch as one line."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a broken installation raises ImportError, OSError or whatever its libraries do
        found = TorchReport(problem=f"torch cannot be imported: {_first_line(error)}")
    else:
        found = report(torch, os.environ)
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
