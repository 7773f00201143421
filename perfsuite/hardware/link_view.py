"""A GPU's link to the others, read from NVML (NVLink, PCIe) or the kernel's view of AMD GPUs (xGMI)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfsuite.hardware.bus import ROOT
from perfsuite.hardware.catalogue import Hardware
from perfsuite.hardware.device import Backend, Device, SystemView
from perfsuite.hardware.links import LinkView, nvlink, pcie, xgmi
from perfsuite.hardware.names import text_of
from perfsuite.hardware.nvml import Nvml, nvml_session, read_nvml

_MAX_NVLINKS = 18
_REMOTE_GPU, _REMOTE_SWITCH = 0, 2
# What NVML answers about the number of a link that the GPU does not have.
_INVALID_ARGUMENT, _NOT_SUPPORTED = 2, 3
_NO_SUCH_LINK = -1

_KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
_KFD_XGMI = 11
_KFD_ONE_HOP = 15
"""The weight of a direct xGMI link; one over another GPU weighs a multiple of it."""


def link_of(device: Device, view: SystemView, *, library: Any = None, root: Path = ROOT) -> LinkView:
    """The link of one of this machine's devices."""
    torch = next((each for each in view.torch.devices if each.index == device.index), None)
    return read_link(
        backend=device.backend,
        uuid=view.uuid_of(device),
        pci_address=None if torch is None else torch.pci_address,
        row=device.hardware(),
        library=library,
        root=root,
    )


def read_link(
    *,
    backend: Backend,
    uuid: str | None,
    pci_address: str | None = None,
    row: Hardware | None = None,
    library: Any = None,
    root: Path = ROOT,
) -> LinkView:
    """The link of the device with this UUID (or else at this PCI address); ``row`` is its data sheet.

    A HardwareError where NVML's driver and library do not match; any other refusal is a reason.
    """
    if backend == "cuda":
        return _cuda_link(uuid, pci_address, row, library)
    if backend == "rocm":
        return _rocm_link(pci_address, row, root / _KFD_NODES)
    return LinkView(reason="a CPU's ranks share memory, not a link" if backend == "cpu" else "XPU links are not read")


def _cuda_link(uuid: str | None, pci_address: str | None, row: Hardware | None, library: Any) -> LinkView:
    with nvml_session(library) as nvml:
        if isinstance(nvml, str):
            return LinkView(reason=nvml)
        view = read_nvml(library)
        gpu = view.find(uuid=uuid, pci_address=pci_address)
        if gpu is None:
            return LinkView(reason=view.problem or "NVML does not show this device")
        if gpu.mig_enabled or gpu.is_vgpu:
            what = "a MIG slice" if gpu.mig_enabled else "a virtual GPU"
            return LinkView(reason=f"{what} does not have its card's links")
        missing: dict[str, str] = {}
        handle = nvml.read(missing, "handle", lambda lib: lib.nvmlDeviceGetHandleByIndex(gpu.index))
        return LinkView(reason=missing["handle"]) if handle is None else _card_link(nvml, handle, row)


def _card_link(nvml: Nvml, handle: Any, row: Hardware | None) -> LinkView:
    """NVLink where any is active, else PCIe."""
    missing: dict[str, str] = {}
    states = _nvlink_states(nvml, handle, missing)
    if states is None:
        return LinkView(reason=f"NVLink: {missing['nvlink']}")
    active = [index for index, is_active in states.items() if is_active]
    if active:
        return _nvlink(nvml, handle, active, row)
    if row is None or row.link_bytes_per_s is None:
        return _pcie(nvml, handle, "")
    if not states:
        return LinkView(reason=f"{row.sku} has NVLinks on its data sheet, and NVML shows none")
    return _pcie(nvml, handle, f"; none of the {len(states)} NVLinks is active")


def _nvlink_states(nvml: Nvml, handle: Any, missing: dict[str, str]) -> dict[int, bool] | None:
    """Whether each NVLink that the GPU has is active; None where NVML does not say."""
    states: dict[int, bool] = {}
    for index in range(nvml.constant("NVML_NVLINK_MAX_LINKS", _MAX_NVLINKS)):
        state = nvml.read(missing, "nvlink", functools.partial(_nvlink_state, handle, index))
        if state is None:
            return None
        if state != _NO_SUCH_LINK:
            states[index] = bool(state)
    return states


def _nvlink_state(handle: Any, index: int, library: Any) -> int:
    try:
        return int(library.nvmlDeviceGetNvLinkState(handle, index))
    except library.NVMLError as error:
        if getattr(error, "value", None) in (_INVALID_ARGUMENT, _NOT_SUPPORTED):
            return _NO_SUCH_LINK
        raise


def _nvlink(nvml: Nvml, handle: Any, active: list[int], row: Hardware | None) -> LinkView:
    missing: dict[str, str] = {}
    ends = nvml.read(missing, "ends", lambda lib: [int(_remote_type(lib, handle, index)) for index in active])
    version = nvml.read(missing, "version", lambda lib: int(lib.nvmlDeviceGetNvLinkVersion(handle, active[0])))
    if ends is None or version is None:
        return LinkView(reason=f"NVLink: {next(iter(missing.values()))}")
    peers = None
    if set(ends) == {nvml.constant("NVML_NVLINK_DEVICE_TYPE_GPU", _REMOTE_GPU)}:
        peers = nvml.read(missing, "peers", lambda lib: len({_remote_address(lib, handle, each) for each in active}))
        if peers is None:
            return LinkView(reason=f"NVLink: {missing['peers']}")
    elif set(ends) != {nvml.constant("NVML_NVLINK_DEVICE_TYPE_SWITCH", _REMOTE_SWITCH)}:
        return LinkView(reason="the NVLinks lead neither all to a switch nor all to GPUs")
    capability = _capability(nvml, handle, row)
    return nvlink(active=len(active), version=version, peers=peers, capability=capability, row=row)


def _remote_type(library: Any, handle: Any, index: int) -> int:
    return int(library.nvmlDeviceGetNvLinkRemoteDeviceType(handle, index))


def _remote_address(library: Any, handle: Any, index: int) -> str:
    return text_of(library.nvmlDeviceGetNvLinkRemotePciInfo(handle, index).busId).lower()


def _capability(nvml: Nvml, handle: Any, row: Hardware | None) -> tuple[int, int] | None:
    """The chip's compute capability as NVML tells it, or else the data sheet."""
    told = nvml.read({}, "capability", lambda lib: lib.nvmlDeviceGetCudaComputeCapability(handle), kind=_two_numbers)
    if told is None and row is not None:
        return _two_numbers(row.chip.compute_capability.split("."))
    found: tuple[int, int] | None = told
    return found


def _two_numbers(parts: Any) -> tuple[int, int]:
    major, minor = parts
    return int(major), int(minor)


def _pcie(nvml: Nvml, handle: Any, why: str) -> LinkView:
    """The fastest generation of card and slot: the current one drops when the GPU is idle. The width does not."""
    missing: dict[str, str] = {}
    now = nvml.read(missing, "now", lambda lib: lib.nvmlDeviceGetCurrPcieLinkGeneration(handle), kind=int)
    most = nvml.read(missing, "most", lambda lib: lib.nvmlDeviceGetMaxPcieLinkGeneration(handle), kind=int)
    width = nvml.read(missing, "width", lambda lib: lib.nvmlDeviceGetCurrPcieLinkWidth(handle), kind=int)
    if most is None or width is None:
        return LinkView(reason=f"PCIe: {missing['most'] if most is None else missing['width']}")
    return pcie(generation=most if now is None else max(most, now), width=width, now_generation=now, why=why)


def _rocm_link(pci_address: str | None, row: Hardware | None, nodes: Path) -> LinkView:
    """xGMI: the figure is the data sheet's, the peers are those that the kernel shows."""
    node = None if pci_address is None else _kfd_node(nodes, pci_address)
    if node is None:
        return LinkView(reason="the kernel's topology of AMD GPUs does not show this device")
    links = [_properties(folder / "properties") for folder in _folders(node / "io_links")]
    peers = {
        link.get("node_to") for link in links if link.get("type") == _KFD_XGMI and link.get("weight", 0) <= _KFD_ONE_HOP
    }
    return xgmi(peers=len(peers), row=row)


def _kfd_node(nodes: Path, pci_address: str) -> Path | None:
    """The node of the GPU at ``pci_address``, such as ``0000:0c:00.0``."""
    for node in _folders(nodes):
        found = _properties(node / "properties")
        if found.get("simd_count") and _address(found) == pci_address.lower():
            return node
    return None


def _address(properties: dict[str, int]) -> str:
    """``location_id`` holds bus, device and function as PCI packs them."""
    location = properties.get("location_id", 0)
    bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 0x7
    return f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _properties(path: Path) -> dict[str, int]:
    """A file of lines ``name number``; empty where it cannot be read."""
    try:
        return dict(_numbers(path.read_text(encoding="ascii")))
    except (OSError, UnicodeDecodeError):
        return {}


def _numbers(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        if value.strip().isdecimal():
            yield name, int(value)
