"""A device that work can run on, and how one of torch's devices becomes one: by exact name, then PCI device id."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from perfsuite.hardware.bus import BusGpu
from perfsuite.hardware.catalogue import Catalogue, Hardware, ambiguity, load
from perfsuite.hardware.cpu import Cpu
from perfsuite.hardware.names import is_generic, part_of, slug, without_vendor
from perfsuite.hardware.nvml import NvmlGpu, NvmlView, bare_uuid
from perfsuite.hardware.torch_report import TorchDevice, TorchReport

Backend = Literal["cuda", "rocm", "xpu", "cpu"]

# What torch and NVML can both tell; torch's answer is first, since it is about what this process may use.
_MERGED = (
    "memory_total_bytes",
    "memory_free_bytes",
    "l2_bytes",
    "sm_count",
    "max_clock_mhz",
    "driver_version",
    "uuid",
)


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device; ``missing`` says why a field is None.

    ``known`` means that the catalogue's peaks hold for it; otherwise ``unknown_reason`` says why not and ceilings are
    measured. ``candidates`` are the SKUs that an ambiguous name can mean. ``index`` is torch's, so it counts what
    CUDA_VISIBLE_DEVICES leaves. ``uuid_hash`` stands for the UUID, which is never kept.
    """

    backend: Backend
    index: int
    name: str
    uuid_hash: str | None
    sku: str
    family: str
    known: bool
    unknown_reason: str | None = None
    candidates: tuple[str, ...] = ()
    compute_capability: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    l2_bytes: int | None = None
    sm_count: int | None = None
    max_clock_mhz: float | None = None
    driver_version: str | None = None
    missing: dict[str, str] = {}

    def hardware(self) -> Hardware | None:
        """The data sheet of this device (of one die, where torch shows a package as several), or None if not known."""
        row = load().by_sku(self.sku) if self.known else None
        return None if row is None else row.per_torch_device()


@dataclass(frozen=True, kw_only=True)
class SystemView:
    """Everything that was seen of a machine; it holds UUIDs and is never written to a file."""

    cpu: Cpu
    nvml: NvmlView
    torch: TorchReport
    bus: tuple[BusGpu, ...] = ()

    def uuid_of(self, device: Device) -> str | None:
        """The UUID under which NVML knows ``device`` (a slice's own), for a worker that reads its conditions."""
        if device.backend == "cpu":
            return None
        return next((each.uuid for each in self.torch.devices if each.index == device.index), None)


@dataclass(frozen=True, kw_only=True)
class _Identity:
    """What a device is: its row, or why it has none."""

    row: Hardware | None = None
    reason: str | None = None
    candidates: tuple[str, ...] = ()


def cpu_device(cpu: Cpu) -> Device:
    """The CPU as a device; its ceilings are always measured."""
    missing = {"sm_count": "a CPU has no streaming multiprocessors", "driver_version": "a CPU has no driver"}
    return Device(
        backend="cpu",
        index=0,
        name=cpu.model,
        uuid_hash=cpu.identity,
        sku=cpu.sku,
        family="cpu",
        known=False,
        unknown_reason="CPUs have no data-sheet peaks: ceilings are measured",
        memory_total_bytes=cpu.memory_total_bytes,
        memory_free_bytes=cpu.memory_free_bytes,
        l2_bytes=cpu.l2_bytes,
        max_clock_mhz=cpu.max_clock_mhz,
        missing=missing | dict(cpu.missing),
    )


def gpu_devices(view: SystemView, catalogue: Catalogue) -> tuple[Device, ...]:
    """Every GPU on which torch can run work, in torch's order."""
    return tuple(gpu_device(device, view, catalogue) for device in view.torch.usable)


def gpu_device(torch_device: TorchDevice, view: SystemView, catalogue: Catalogue, *, sku: str | None = None) -> Device:
    """One of torch's devices; ``sku`` is the user's word for one whose name is ambiguous."""
    gpu = view.nvml.find(uuid=torch_device.uuid, pci_address=torch_device.pci_address)
    identity = _identify(torch_device, gpu, view.bus, catalogue, sku)
    row = identity.row
    own_sku = _unlisted_sku(torch_device, catalogue) if row is None else row.sku
    values, missing = _merge(torch_device, gpu, view)
    uuid = values.pop("uuid")
    if uuid is None:
        missing["uuid_hash"] = missing.pop("uuid")
    return Device(
        backend=view.torch.backend,
        index=torch_device.index,
        name=torch_device.name,
        uuid_hash=None if uuid is None else hashlib.sha256(bare_uuid(uuid).encode()).hexdigest()[:16],
        sku=own_sku,
        family=own_sku if row is None else row.family,
        known=row is not None,
        unknown_reason=identity.reason,
        candidates=identity.candidates,
        compute_capability=torch_device.compute_capability,
        missing=missing,
        **values,
    )


def _identify(
    device: TorchDevice, gpu: NvmlGpu | None, bus: tuple[BusGpu, ...], catalogue: Catalogue, sku: str | None
) -> _Identity:
    part = part_of(device.name) or _nvml_part(gpu)
    if part is not None:
        return _Identity(reason=f"{device.name!r} is {part}: a full card's peaks do not hold for it")
    rows = catalogue.candidates(device.name)
    row = rows[0] if len(rows) == 1 else _by_pci_id(device, gpu, bus, catalogue, rows)
    if row is None and sku is not None:
        row = next((each for each in rows if each.sku == sku), None)
    if row is not None:
        return _whole(row, device)
    if rows:
        return _Identity(reason=ambiguity(device.name, rows), candidates=tuple(each.sku for each in rows))
    return _Identity(reason=f"{device.name!r} is not in the catalogue: ceilings are measured")


def _nvml_part(gpu: NvmlGpu | None) -> str | None:
    """What NVML knows of a device whose name hides that it is a part."""
    if gpu is not None and gpu.mig_enabled:
        return "a MIG slice"
    return "a virtual GPU" if gpu is not None and gpu.is_vgpu else None


def _by_pci_id(
    device: TorchDevice,
    gpu: NvmlGpu | None,
    bus: tuple[BusGpu, ...],
    catalogue: Catalogue,
    candidates: tuple[Hardware, ...],
) -> Hardware | None:
    """The row of the PCI device id, unless the name says that this is another product.

    Virtual GPUs and custom boards share the id of the card that they are cut from, under a name of their own.
    """
    on_bus = next((each.pci_id for each in bus if each.address == device.pci_address), None)
    pci_id = gpu.pci_id if gpu is not None and gpu.pci_id is not None else on_bus
    row = None if pci_id is None else catalogue.by_pci_id(pci_id)
    if row is None:
        return None
    old_names = {without_vendor(name) for name in row.device_names}
    agrees = row in candidates or is_generic(device.name) or device.name in old_names
    return row if agrees else None


def _whole(row: Hardware, device: TorchDevice) -> _Identity:
    """The row, unless the device shows fewer SMs (compute units) than it: then it is a partition of the card."""
    listed = row.per_torch_device().chip.sm
    if listed is None or device.sm_count is None or device.sm_count >= listed:
        return _Identity(row=row)
    return _Identity(
        reason=f"{device.name!r} shows {device.sm_count} of {listed} SMs, a partition: "
        "a full card's peaks do not hold for it"
    )


def _unlisted_sku(device: TorchDevice, catalogue: Catalogue) -> str:
    """The slug of an unlisted device's name; a part that goes by a listed name is told apart by its SM count."""
    own = slug(device.name)
    if not catalogue.find(own) and not catalogue.candidates(device.name):
        return own
    return f"unlisted-{own}" if device.sm_count is None else f"unlisted-{own}-{device.sm_count}-sm"


def _merge(device: TorchDevice, gpu: NvmlGpu | None, view: SystemView) -> tuple[dict[str, Any], dict[str, str]]:
    """Each field from torch, else from NVML; where neither has it, None and the reason that says most."""
    values: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name in _MERGED:
        value = getattr(device, name, None)
        values[name] = _from_nvml(name, gpu, view.nvml) if value is None else value
        if values[name] is None:
            missing[name] = _reason(name, device, gpu, view.nvml)
    return values, missing


def _from_nvml(name: str, gpu: NvmlGpu | None, nvml: NvmlView) -> Any:
    """NVML's value of a field; the memory of a card that is cut into MIG slices is no slice's."""
    if name == "driver_version":
        return nvml.driver_version
    if gpu is None or (gpu.mig_enabled and name.startswith("memory_")):
        return None
    return getattr(gpu, name, None)


def _reason(name: str, device: TorchDevice, gpu: NvmlGpu | None, nvml: NvmlView) -> str:
    """Why neither has a field: the refusal of the one that was asked last."""
    refusals: Mapping[str, str] = {**device.missing, **nvml.missing, **({} if gpu is None else gpu.missing)}
    no_nvml = nvml.problem or "NVML shows no such device"
    return refusals.get(name) or refusals.get("handle", no_nvml)
