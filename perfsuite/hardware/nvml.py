"""NVML in this process: text instead of bytes, and a reason for each field that it refuses."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from perfsuite.errors import HardwareError
from perfsuite.hardware.names import text_of

T = TypeVar("T")

_LIB_RM_VERSION_MISMATCH = 18
_CLOCK_SM = 1
_VIRTUALIZATION_VGPU = 2


@dataclass(frozen=True, kw_only=True)
class NvmlGpu:
    """One physical GPU of NVML; ``missing`` says why a field is None."""

    index: int
    name: str | None = None
    uuid: str | None = None
    pci_address: str | None = None
    pci_id: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    max_clock_mhz: float | None = None
    mig_enabled: bool | None = None
    mig_uuids: tuple[str, ...] = ()
    is_vgpu: bool | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NvmlView:
    """What NVML shows; ``problem`` says why it shows nothing, ``missing`` why a field is None."""

    gpus: tuple[NvmlGpu, ...] = ()
    driver_version: str | None = None
    problem: str | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    def find(self, *, uuid: str | None, pci_address: str | None) -> NvmlGpu | None:
        """The GPU with this UUID (or that has the MIG slice with it), or else the one at this PCI address."""
        wanted = None if uuid is None else bare_uuid(uuid)
        for gpu in self.gpus:
            if wanted is not None and wanted in {bare_uuid(each) for each in (gpu.uuid, *gpu.mig_uuids) if each}:
                return gpu
        return next((gpu for gpu in self.gpus if pci_address is not None and gpu.pci_address == pci_address), None)


def bare_uuid(uuid: str) -> str:
    """A UUID in the form that NVML and torch share: lower-case, without ``GPU-`` or ``MIG-``."""
    return uuid.strip().lower().removeprefix("mig-").removeprefix("gpu-")


class Nvml:
    """The ``pynvml`` module with every call guarded: a value, or None and a reason kept in ``missing``."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def constant(self, name: str, default: int) -> int:
        """A constant of the bindings, whose name differs between their versions."""
        return int(getattr(self._library, name, default))

    def read(
        self,
        missing: dict[str, str],
        name: str,
        call: Callable[[Any], T],
        *,
        kind: Callable[[T], Any] | None = None,
    ) -> Any:
        """What ``call(library)`` returns, turned by ``kind``; None and ``missing[name]`` where NVML refuses it."""
        try:
            value = call(self._library)
            return value if kind is None else kind(value)
        except self._library.NVMLError as error:
            missing[name] = f"NVML answers: {text_of(str(error))}"
        except AttributeError as error:
            missing[name] = f"these NVML bindings lack it: {error}"
        except (TypeError, ValueError) as error:
            missing[name] = f"NVML answered what cannot be read: {error}"
        return None


def load_library() -> Any:
    """The ``pynvml`` module of nvidia-ml-py; ImportError where it is not installed."""
    return importlib.import_module("pynvml")


@contextlib.contextmanager
def nvml_session(library: Any = None) -> Iterator[Nvml | str]:
    """NVML between init and shutdown, or the reason why there is none.

    Sessions nest: NVML counts them, so a worker that holds one open makes the inner ones cheap. A driver that does not
    match its library is a HardwareError: CUDA would fail as well, and later.
    """
    opened = _open(library)
    if isinstance(opened, str):
        yield opened
        return
    try:
        yield Nvml(opened)
    finally:
        with contextlib.suppress(opened.NVMLError):
            opened.nvmlShutdown()


def _open(library: Any) -> Any:
    """The library after init, or why it cannot be used."""
    try:
        found = load_library() if library is None else library
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        found.nvmlInit()
    except found.NVMLError as error:
        if getattr(error, "value", None) == _LIB_RM_VERSION_MISMATCH:
            raise HardwareError(
                "NVML: the NVIDIA driver's library and kernel module differ in version, as after an update: "
                "reboot, or reload the kernel module"
            ) from None
        return text_of(str(error))
    return found


def read_nvml(library: Any = None) -> NvmlView:
    """Every GPU that NVML shows; a HardwareError where driver and library do not match."""
    with nvml_session(library) as nvml:
        if isinstance(nvml, str):
            return NvmlView(problem=nvml)
        missing: dict[str, str] = {}
        count = nvml.read(missing, "gpus", lambda lib: lib.nvmlDeviceGetCount())
        driver = nvml.read(missing, "driver_version", lambda lib: lib.nvmlSystemGetDriverVersion(), kind=text_of)
        gpus = tuple(_gpu(nvml, index) for index in range(count or 0))
        return NvmlView(gpus=gpus, driver_version=driver, problem=missing.get("gpus"), missing=missing)


def _gpu(nvml: Nvml, index: int) -> NvmlGpu:
    missing: dict[str, str] = {}
    handle = nvml.read(missing, "handle", lambda lib: lib.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return NvmlGpu(index=index, missing=missing)
    pci = nvml.read(missing, "pci", lambda lib: lib.nvmlDeviceGetPciInfo(handle), kind=_pci)
    memory = nvml.read(missing, "memory", lambda lib: lib.nvmlDeviceGetMemoryInfo(handle))
    for name in ("memory_total_bytes", "memory_free_bytes"):
        if memory is None:
            missing[name] = missing["memory"]
    sm = nvml.constant("NVML_CLOCK_SM", _CLOCK_SM)
    return NvmlGpu(
        index=index,
        name=nvml.read(missing, "name", lambda lib: lib.nvmlDeviceGetName(handle), kind=text_of),
        uuid=nvml.read(missing, "uuid", lambda lib: lib.nvmlDeviceGetUUID(handle), kind=text_of),
        pci_address=None if pci is None else pci[0],
        pci_id=None if pci is None else pci[1],
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_free_bytes=None if memory is None else int(memory.free),
        max_clock_mhz=nvml.read(
            missing, "max_clock_mhz", lambda lib: lib.nvmlDeviceGetMaxClockInfo(handle, sm), kind=float
        ),
        mig_enabled=nvml.read(missing, "mig_enabled", lambda lib: bool(lib.nvmlDeviceGetMigMode(handle)[0])),
        mig_uuids=_mig_uuids(nvml, handle),
        is_vgpu=nvml.read(missing, "is_vgpu", lambda lib: lib.nvmlDeviceGetVirtualizationMode(handle), kind=_is_vgpu),
        missing=missing,
    )


def _is_vgpu(mode: int) -> bool:
    return mode == _VIRTUALIZATION_VGPU


def _pci(pci: Any) -> tuple[str, str]:
    """Address and id as the kernel spells them: ``00000000:07:00.0`` is ``0000:07:00.0``, 0x20B010DE ``10de:20b0``."""
    domain, _, rest = text_of(pci.busId).lower().partition(":")
    device_and_vendor = int(pci.pciDeviceId)
    return f"{int(domain, 16):04x}:{rest}", f"{device_and_vendor & 0xFFFF:04x}:{device_and_vendor >> 16:04x}"


def _mig_uuids(nvml: Nvml, handle: Any) -> tuple[str, ...]:
    """The UUIDs of a GPU's MIG slices; GPUs without MIG refuse the question, which is no reason to report."""
    unasked: dict[str, str] = {}
    count = nvml.read(unasked, "mig", lambda lib: lib.nvmlDeviceGetMaxMigDeviceCount(handle))
    found = (_mig_uuid(nvml, handle, index) for index in range(count or 0))
    return tuple(uuid for uuid in found if uuid is not None)


def _mig_uuid(nvml: Nvml, handle: Any, index: int) -> str | None:
    def uuid(lib: Any) -> str:
        return text_of(lib.nvmlDeviceGetUUID(lib.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))

    value: str | None = nvml.read({}, "mig", uuid)
    return value
