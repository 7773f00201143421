"""The GPUs that the machine has, whether or not torch can use them: the PCI bus and the device nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

_NVIDIA, _AMD, _INTEL = "10de", "1002", "8086"
_VENDOR_NAMES = {_NVIDIA: "NVIDIA", _AMD: "AMD", _INTEL: "Intel"}

# Nodes of compute drivers: CUDA, Jetson's CUDA, WSL, ROCm. Jetson and WSL show no GPU on the PCI bus.
_NODES = ("dev/nvidiactl", "dev/nvhost-gpu", "dev/nvgpu", "dev/dxg", "dev/kfd")


@dataclass(frozen=True, kw_only=True)
class BusGpu:
    """A GPU on the PCI bus: its address, and its ids in hexadecimal without a prefix."""

    address: str
    vendor_id: str
    device_id: str

    @property
    def pci_id(self) -> str:
        """``vendor:device``, as the catalogue writes it."""
        return f"{self.vendor_id}:{self.device_id}"

    @property
    def vendor(self) -> str:
        """The vendor's name."""
        return _VENDOR_NAMES[self.vendor_id]


def read_bus(root: Path = ROOT) -> tuple[BusGpu, ...]:
    """The compute GPUs on the PCI bus, by address; none where the system has no such view."""
    found = (_gpu(folder) for folder in _entries(root / "sys/bus/pci/devices"))
    return tuple(gpu for gpu in found if gpu is not None)


def has_gpu_node(root: Path = ROOT) -> bool:
    """Whether a compute driver's device node, or the render node of a discrete Intel GPU, is there."""
    return any((root / node).exists() for node in _NODES) or _has_discrete_intel(root)


def _gpu(folder: Path) -> BusGpu | None:
    vendor_id, device_id, class_id = (_hex(folder / name) for name in ("vendor", "device", "class"))
    if not _is_compute(vendor_id, class_id):
        return None
    return BusGpu(address=folder.name, vendor_id=vendor_id, device_id=device_id)


def _is_compute(vendor_id: str, class_id: str) -> bool:
    """Any NVIDIA display device; of AMD and Intel, whose CPUs have graphics too, only accelerator classes."""
    if vendor_id == _NVIDIA:
        return class_id.startswith("03")
    if vendor_id == _AMD:
        return class_id.startswith(("0380", "1200"))
    return vendor_id == _INTEL and class_id.startswith("0380")


def _has_discrete_intel(root: Path) -> bool:
    """An Intel render node whose PCI bus is not 0, where integrated graphics sits."""
    for folder in _entries(root / "sys/class/drm"):
        if folder.name.startswith("renderD") and _hex(folder / "device/vendor") == _INTEL:
            bus = (folder / "device").resolve().name.split(":")
            if len(bus) == 3 and bus[1] != "00":
                return True
    return False


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _hex(path: Path) -> str:
    """A sysfs number without its ``0x``; empty where it cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip().lower().removeprefix("0x")
    except (OSError, UnicodeDecodeError):
        return ""
