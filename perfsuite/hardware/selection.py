"""From ``--gpu`` to a device: gather what the machine shows, then select without ever falling back quietly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfsuite.errors import HardwareError
from perfsuite.hardware.bus import has_gpu_node, read_bus
from perfsuite.hardware.catalogue import Catalogue, load
from perfsuite.hardware.cpu import read_cpu
from perfsuite.hardware.device import Device, SystemView, cpu_device, gpu_device, gpu_devices
from perfsuite.hardware.nvml import NvmlView, read_nvml
from perfsuite.hardware.torch_report import TorchReport, run_probe

ROOT = Path("/")

_NOT_ASKED = "not asked: the request names the CPU"
_NO_GPU = "not asked: neither NVML nor the PCI bus shows a GPU"
_BUILDS = {"AMD": "ROCm", "Intel": "XPU"}


def gather(
    request: str = "auto",
    *,
    probe: bool | None = None,
    root: Path = ROOT,
    nvml_library: Any = None,
    probe_command: Sequence[str] | None = None,
) -> SystemView:
    """Look at this machine as far as ``request`` needs: for a CPU neither NVML nor torch is asked.

    torch is asked in a child process, and only where something hints at a GPU, unless ``probe`` says otherwise. A
    driver that does not match its library is a HardwareError. ``root``, ``nvml_library`` and ``probe_command`` stand in
    for the real machine in tests.
    """
    cpu = read_cpu(root)
    if _is_cpu(request) and not probe:
        return SystemView(cpu=cpu, nvml=NvmlView(problem=_NOT_ASKED), torch=TorchReport(problem=_NOT_ASKED))
    nvml = read_nvml(nvml_library)
    bus = read_bus(root)
    wanted = bool(nvml.gpus or bus or has_gpu_node(root)) if probe is None else probe
    if not wanted:
        torch = TorchReport(problem=_NO_GPU)
    else:
        torch = run_probe() if probe_command is None else run_probe(command=probe_command)
    return SystemView(cpu=cpu, nvml=nvml, torch=torch, bus=bus)


def detect(request: str = "auto") -> Device:
    """The device of this machine that ``request`` names."""
    return select(request, view=gather(request))


def select(request: str, *, view: SystemView) -> Device:
    """The device that ``--gpu request`` means on the machine in ``view``: auto, cpu, a family, a SKU.

    A HardwareError where it is absent, ambiguous, unknown or there but unusable.
    """
    return select_all(request, view=view)[0]


def select_all(request: str, *, view: SystemView) -> tuple[Device, ...]:
    """As ``select``, with every further device of the same SKU, in torch's order: what ranks can use."""
    wanted = request.strip().lower()
    if wanted == "cpu":
        return (cpu_device(view.cpu),)
    catalogue = load()
    gpus = gpu_devices(view, catalogue)
    found = _auto(view, gpus) if wanted == "auto" else _named(request, view, gpus, catalogue)
    return tuple(device for device in found if device.sku == found[0].sku)


def device_of_rank(request: str, local_rank: int) -> str:
    """The SKU of the device that a rank of this host uses; a HardwareError where there are not so many."""
    devices = select_all(request, view=gather(request))
    if devices[0].backend != "cpu" and local_rank >= len(devices):
        raise HardwareError(f"local rank {local_rank} has no device: {len(devices)} {devices[0].sku} are here")
    return devices[0].sku


def unusable_gpu(view: SystemView) -> str | None:
    """A GPU that is here and that torch cannot use, why, and the remedy; None where there is none."""
    shown = _shown(view)
    if view.torch.usable or shown is None:
        return None
    torch = view.torch
    if torch.hidden_by is not None and torch.runtime_version is not None:
        return f"{shown}, but {torch.hidden_by} hides it from torch: unset it"
    name = f"torch {torch.version}" if torch.version else "torch"
    lost = next((device.problem for device in torch.devices if device.problem is not None), None)
    why = lost or torch.problem or "it sees no device"
    return f"{shown}, but {name} cannot use it ({why}): {_remedy(view, lost=lost is not None)}"


def _is_cpu(request: str) -> bool:
    wanted = request.strip().lower()
    return wanted == "cpu" or wanted.startswith("cpu-")


def _shown(view: SystemView) -> str | None:
    """Where a GPU shows, and its name."""
    if view.nvml.gpus:
        return f"NVML shows {view.nvml.gpus[0].name or 'an NVIDIA GPU'}"
    if view.bus:
        gpu = view.bus[0]
        return f"the PCI bus shows an {gpu.vendor} GPU ({gpu.pci_id} at {gpu.address})"
    return f"torch shows {view.torch.devices[0].name}" if view.torch.devices else None


def _remedy(view: SystemView, *, lost: bool) -> str:
    """What to do about a GPU that torch cannot use."""
    if lost:
        return "end what holds it, or reset it"
    vendor = "NVIDIA" if view.nvml.gpus or not view.bus else view.bus[0].vendor
    build = _BUILDS.get(vendor, "CUDA")
    if view.torch.version is None:
        return f"repair torch, built for {build}"
    if view.torch.runtime_version is None:
        return f"install torch built for {build}"
    return f"check the {vendor} driver"


def _auto(view: SystemView, gpus: tuple[Device, ...]) -> tuple[Device, ...]:
    problem = unusable_gpu(view)
    if problem is not None:
        raise HardwareError(f"--gpu auto: {problem}, or use --gpu cpu")
    if gpus and gpus[0].candidates:
        raise HardwareError(f"--gpu auto: GPU {gpus[0].index}: {gpus[0].unknown_reason}")
    return gpus or (cpu_device(view.cpu),)


def _named(request: str, view: SystemView, gpus: tuple[Device, ...], catalogue: Catalogue) -> tuple[Device, ...]:
    """The devices that are called so: a listed SKU or family, the slug of an unlisted device, this CPU's SKU."""
    request = request.strip()
    wanted = request.lower()
    skus = {row.sku for row in catalogue.find(request)}
    found = tuple(device for device in gpus if device.sku in skus or device.sku == wanted)
    found = found or _settled(wanted, view, gpus, catalogue)
    if found:
        return found
    cpu = cpu_device(view.cpu)
    if wanted == cpu.sku:
        return (cpu,)
    if not _is_cpu(request):
        _refuse_unknown(request, gpus, catalogue)
        problem = unusable_gpu(view)
        if problem is not None:
            raise HardwareError(f"--gpu {request}: {problem}")
    raise HardwareError(f"--gpu {request}: no {request} here; this machine has {_machine(gpus, cpu)}")


def _settled(wanted: str, view: SystemView, gpus: tuple[Device, ...], catalogue: Catalogue) -> tuple[Device, ...]:
    """The devices of ambiguous name that the user calls ``wanted``."""
    indexes = {device.index for device in gpus if wanted in device.candidates}
    return tuple(
        gpu_device(device, view, catalogue, sku=wanted) for device in view.torch.usable if device.index in indexes
    )


def _refuse_unknown(request: str, gpus: tuple[Device, ...], catalogue: Catalogue) -> None:
    """Refuse a name that nothing has, and a family whose device here does not say which of its SKUs it is."""
    try:
        skus = {row.sku for row in catalogue.resolve(request)}
    except HardwareError as error:
        raise HardwareError(f"--gpu {request}: {error}") from None
    for device in gpus:
        if skus.intersection(device.candidates):
            raise HardwareError(f"--gpu {request}: GPU {device.index}: {device.unknown_reason}")


def _machine(gpus: tuple[Device, ...], cpu: Device) -> str:
    """What is here, for a message."""
    if not gpus:
        return f"{cpu.sku} (no GPU)"
    kinds = dict.fromkeys((device.sku, device.name) for device in gpus)
    return ", ".join(f"{sku} ({name})" for sku, name in kinds) + f" and {cpu.sku}"
