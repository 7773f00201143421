"""Links: what NVML and the kernel tell of them, and a reason for all that they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from perfsuite.errors import HardwareError
from perfsuite.hardware import Device, Hardware, SystemView, load
from perfsuite.hardware.cpu import Cpu
from perfsuite.hardware.link_view import link_of, read_link
from perfsuite.hardware.links import Link, LinkView, common_link, pcie
from perfsuite.hardware.nvml import NvmlView
from perfsuite.hardware.torch_report import TorchDevice, TorchReport

UUID = "GPU-11111111-2222-3333-4444-555555555555"
GPU, NPU, SWITCH = 0, 1, 2
V2, V3, V3_1, V4, V5 = 2, 4, 5, 6, 7
"""NVML's codes of NVLink versions."""


class FakeError(Exception):
    """NVMLError: a code and a text."""

    def __init__(self, value: int, text: str | bytes = "Not Supported") -> None:
        super().__init__(text)
        self.value = value


class FakeNvml:
    """The bindings with one GPU: ``links`` are its NVLinks, True where active; ``ends`` what each leads to."""

    NVMLError = FakeError

    def __init__(
        self,
        *,
        links: tuple[bool, ...] = (),
        version: int = V4,
        end: int = SWITCH,
        peers: int = 1,
        capability: tuple[int, int] = (9, 0),
        generations: tuple[int, int] = (4, 4),
        width: int = 16,
    ) -> None:
        self.links = links
        self.ends = [end] * len(links)
        self.peers = peers
        self.version = version
        self.capability = capability
        self.generations = generations
        self.width = width
        self.mig = 0
        self.refused: dict[str, Exception] = {}
        self.open = 0

    def _init(self) -> None:
        self.open += 1

    def _shutdown(self) -> None:
        self.open -= 1

    def _state(self, handle: str, index: int) -> int:
        if index >= len(self.links):
            raise FakeError(2, "Invalid Argument")
        return int(self.links[index])

    def _peer(self, handle: str, index: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{0x40 + index % self.peers:02X}:00.0".encode())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: "handle",
            "nvmlDeviceGetUUID": lambda handle: UUID.encode(),
            "nvmlDeviceGetMigMode": lambda handle: [self.mig, 0],
            "nvmlDeviceGetNvLinkState": self._state,
            "nvmlDeviceGetNvLinkVersion": lambda handle, index: self.version,
            "nvmlDeviceGetNvLinkRemoteDeviceType": lambda handle, index: self.ends[index],
            "nvmlDeviceGetNvLinkRemotePciInfo": self._peer,
            "nvmlDeviceGetCudaComputeCapability": lambda handle: self.capability,
            "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: self.generations[0],
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: self.generations[1],
            "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: self.width,
        }
        if name not in answers:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            assert name == "nvmlInit" or self.open, f"{name} before nvmlInit"
            if name in self.refused:
                raise self.refused[name]
            return answers[name](*arguments)

        return call


def row(sku: str) -> Hardware:
    found = load().by_sku(sku)
    assert found is not None
    return found


def read(library: FakeNvml, sku: str | None = None) -> LinkView:
    view = read_link(backend="cuda", uuid=UUID, row=None if sku is None else row(sku), library=library)
    assert library.open == 0
    assert (view.link is None) != (view.reason is None)
    return view


def link(library: FakeNvml, sku: str | None = None) -> Link:
    view = read(library, sku)
    assert view.link is not None, view.reason
    return view.link


# NVLink


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(
    ("sku", "count", "version", "capability", "gb_per_s", "reduces"),
    [
        ("v100-sxm2-32gb", 6, V2, (7, 0), 150, False),
        ("a100-sxm4-80gb", 12, V3, (8, 0), 300, False),
        ("a800-sxm4-80gb", 8, V3, (8, 0), 200, False),
        ("h100-sxm5-80gb", 18, V4, (9, 0), 450, True),
        ("h800-sxm5-80gb", 8, V4, (9, 0), 200, True),
        ("h200-sxm-141gb", 18, V4, (9, 0), 450, True),
        ("b200-sxm-180gb", 18, V5, (10, 0), 900, True),
        ("b300-sxm-288gb", 18, V5, (10, 3), 900, True),
    ],
)
def test_links_through_a_switch_agree_with_the_catalogue(
    sku: str, count: int, version: int, capability: tuple[int, int], gb_per_s: float, reduces: bool, listed: bool
) -> None:
    library = FakeNvml(links=(True,) * count, version=version, capability=capability)
    found = link(library, sku if listed else None)
    assert row(sku).link_bytes_per_s == gb_per_s * 1e9
    assert found == Link(
        kind="nvlink_switch",
        bytes_per_s=gb_per_s * 1e9,
        reduces=reduces,
        detail=f"{count} NVLinks x {gb_per_s / count:g} GB/s per direction, through a switch",
    )


def test_links_of_a_narrower_chip() -> None:
    library = FakeNvml(links=(True,) * 4, version=V3_1, end=GPU, capability=(8, 6))
    assert link(library, "a40").bytes_per_s == 56.25e9
    found = link(library, "rtx-3090")
    assert (found.kind, found.bytes_per_s, found.peers) == ("nvlink_mesh", 56.25e9, 1)
    assert found.detail == "4 NVLinks x 14.0625 GB/s per direction, to 1 GPU"


def test_links_that_are_down_are_told() -> None:
    found = link(FakeNvml(links=(True,) * 16 + (False,) * 2), "h100-sxm5-80gb")
    assert found.bytes_per_s == 400e9
    assert found.detail.endswith("; the data sheet has 450 GB/s, that is 18 links: the others are not active")


def test_a_driver_that_calls_hoppers_links_the_next_version_changes_nothing() -> None:
    assert link(FakeNvml(links=(True,) * 18, version=V5), "h200-sxm-141gb").bytes_per_s == 450e9
    unasked = FakeNvml(links=(True,) * 18, version=V5)
    unasked.refused["nvmlDeviceGetCudaComputeCapability"] = FakeError(3)
    assert link(unasked, "h200-sxm-141gb").bytes_per_s == 450e9
    assert link(unasked).bytes_per_s == 900e9  # neither chip nor data sheet: the version's word alone


def test_more_than_the_data_sheet_is_cut_to_it() -> None:
    found = link(FakeNvml(links=(True,) * 12, version=V3, capability=(8, 0)), "a800-sxm4-80gb")
    assert found.bytes_per_s == 200e9
    assert found.detail.endswith("; the data sheet has 200 GB/s, which is taken")


@pytest.mark.parametrize(("count", "peers"), [(12, 1), (18, 3), (6, 4)])
def test_links_to_gpus_are_a_mesh(count: int, peers: int) -> None:
    found = link(FakeNvml(links=(True,) * count, end=GPU, peers=peers))
    assert (found.kind, found.bytes_per_s, found.peers, found.reduces) == ("nvlink_mesh", count * 25e9, peers, False)


def test_links_that_lead_elsewhere_are_no_figure() -> None:
    mixed = FakeNvml(links=(True,) * 4)
    mixed.ends[0] = GPU
    for library in (mixed, FakeNvml(links=(True,) * 4, end=NPU)):
        assert read(library).reason == "the NVLinks lead neither all to a switch nor all to GPUs"


def test_a_version_that_is_not_known_is_no_figure() -> None:
    library = FakeNvml(links=(True,) * 36, version=9, capability=(12, 9))
    assert read(library).reason == "NVML's NVLink version code 9 is not known"


# PCIe


@pytest.mark.parametrize(
    ("generation", "width", "gb_per_s"),
    [(3, 16, 15.76), (4, 16, 31.504), (4, 8, 15.752), (5, 16, 63.008), (6, 16, 121.008)],
)
def test_pcie_by_generation_and_width(generation: int, width: int, gb_per_s: float) -> None:
    found = link(FakeNvml(generations=(generation, generation), width=width), "l4")
    assert (found.kind, found.peers) == ("pcie", None)
    assert found.bytes_per_s == pytest.approx(gb_per_s * 1e9)
    assert found.detail.startswith(f"PCIe {generation}.0 x{width}, an upper bound")


def test_an_idle_cards_generation_is_not_its_peak() -> None:
    found = link(FakeNvml(generations=(1, 4)), "l4")
    assert found.bytes_per_s == pytest.approx(31.504e9)
    assert found.detail.endswith("; read while at generation 1, as when idle")


def test_a_card_whose_links_are_all_down_has_pcie() -> None:
    found = link(FakeNvml(links=(False,) * 12), "a100-sxm4-80gb")
    assert found.kind == "pcie"
    assert found.detail.endswith("; none of the 12 NVLinks is active")


def test_no_links_where_the_data_sheet_has_some_is_no_figure() -> None:
    assert read(FakeNvml(), "a100-sxm4-80gb").reason == (
        "a100-sxm4-80gb has NVLinks on its data sheet, and NVML shows none"
    )


@pytest.mark.parametrize(("generation", "width"), [(7, 16), (0, 16), (4, 0)])
def test_a_generation_that_is_not_known_is_no_figure(generation: int, width: int) -> None:
    assert pcie(generation=generation, width=width).link is None


# Refusals

NVLINK_GETTERS = (
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkVersion",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo",
)
PCIE_GETTERS = ("nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth")
REFUSALS = (FakeError(4, "Insufficient Permissions"), FakeError(999, b"Unknown Error"), AttributeError("no function"))


@pytest.mark.parametrize("error", REFUSALS, ids=str)
@pytest.mark.parametrize("getter", [*NVLINK_GETTERS, *PCIE_GETTERS])
def test_each_getter_in_turn_may_be_refused(getter: str, error: Exception) -> None:
    links = (True,) * 4 if getter in NVLINK_GETTERS else ()
    library = FakeNvml(links=links, end=GPU)
    library.refused[getter] = error
    reason = read(library).reason
    assert reason is not None
    assert reason.startswith("NVLink: " if links else "PCIe: ")
    assert str(error.args[0] if isinstance(error.args[0], str) else error.args[0].decode()) in reason


def test_a_card_without_nvlink_refuses_the_question() -> None:
    library = FakeNvml()
    library.refused["nvmlDeviceGetNvLinkState"] = FakeError(3)
    assert link(library, "l4").kind == "pcie"


def test_a_current_generation_that_is_refused_is_not_needed() -> None:
    library = FakeNvml()
    library.refused["nvmlDeviceGetCurrPcieLinkGeneration"] = FakeError(3)
    assert link(library).bytes_per_s == pytest.approx(31.504e9)


@pytest.mark.parametrize(
    ("getter", "reason"),
    [
        ("nvmlInit", "Not Supported"),
        ("nvmlDeviceGetCount", "NVML answers: Not Supported"),
        ("nvmlDeviceGetUUID", "NVML does not show this device"),
    ],
)
def test_without_nvml_there_is_a_reason(getter: str, reason: str) -> None:
    library = FakeNvml()
    library.refused[getter] = FakeError(3)
    assert read(library).reason == reason


def test_a_driver_that_does_not_match_its_library_is_refused() -> None:
    library = FakeNvml()
    library.refused["nvmlInit"] = FakeError(18)
    with pytest.raises(HardwareError, match="differ in version"):
        read(library)


def test_a_slice_does_not_have_its_cards_links() -> None:
    library = FakeNvml(links=(True,) * 12)
    library.mig = 1
    assert read(library, "a100-sxm4-80gb").reason == "a MIG slice does not have its card's links"


@pytest.mark.parametrize("backend", ["cpu", "xpu"])
def test_other_devices_have_no_figure(backend: Any) -> None:
    view = read_link(backend=backend, uuid=None)
    assert view.link is None
    assert view.reason


# AMD


def hive(root: Path, *, gpus: int, links: int, weight: int = 15) -> Path:
    """The kernel's view of one CPU and ``gpus`` GPUs at buses 0x0c, 0x1c ..., each with ``links`` xGMI links."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 96\nsimd_count 0\nlocation_id 0\ndomain 0\n")
    for gpu in range(gpus):
        node = nodes / str(gpu + 1)
        location = (0x0C + 0x10 * gpu) << 8
        write(node / "properties", f"cpu_cores_count 0\nsimd_count 1216\nlocation_id {location}\ndomain 0\nname x\n")
        write(node / "io_links/0/properties", "type 2\nnode_to 0\nweight 20\n")
        others = [other for other in range(gpus) if other != gpu][:links]
        for number, other in enumerate(others, start=1):
            text = f"type 11\nnode_from {gpu + 1}\nnode_to {other + 1}\nweight {weight}\n"
            write(node / f"io_links/{number}/properties", text)
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")


def rocm(root: Path, sku: str | None = "mi300x", address: str = "0000:1c:00.0") -> LinkView:
    hardware = None if sku is None else row(sku).per_torch_device()
    return read_link(backend="rocm", uuid="x", pci_address=address, row=hardware, root=root)


@pytest.mark.parametrize(("sku", "gb_per_s"), [("mi300x", 7 * 64), ("mi325x", 7 * 64), ("mi355x", 7 * 76.5)])
def test_xgmi_is_a_mesh_of_all(tmp_path: Path, sku: str, gb_per_s: float) -> None:
    found = rocm(hive(tmp_path, gpus=8, links=7), sku).link
    assert found == Link(
        kind="xgmi_mesh",
        bytes_per_s=gb_per_s * 1e9,
        peers=7,
        detail=f"{sku} xGMI links per direction, to 7 GPUs",
    )


def test_a_gpu_over_another_is_no_peer(tmp_path: Path) -> None:
    assert rocm(hive(tmp_path, gpus=8, links=7, weight=30)).reason == "no xGMI link to another GPU is there"
    assert rocm(hive(tmp_path, gpus=8, links=5)).link is not None


@pytest.mark.parametrize(
    ("sku", "address", "reason"),
    [
        ("mi250x", "0000:1c:00.0", "the catalogue has no figure for this device's xGMI links"),
        (None, "0000:1c:00.0", "the catalogue has no figure for this device's xGMI links"),
        ("mi300x", "0000:ff:00.0", "the kernel's topology of AMD GPUs does not show this device"),
    ],
)
def test_xgmi_that_is_not_known_has_a_reason(tmp_path: Path, sku: str | None, address: str, reason: str) -> None:
    assert rocm(hive(tmp_path, gpus=8, links=7), sku, address).reason == reason


def test_without_the_kernels_view_there_is_a_reason(tmp_path: Path) -> None:
    assert rocm(tmp_path).reason == "the kernel's topology of AMD GPUs does not show this device"


# The devices of a machine, and several


def machine(device: TorchDevice) -> SystemView:
    torch = TorchReport(version="2.13.0", backend="cuda", runtime_version="CUDA 12.8", devices=(device,))
    cpu = Cpu(model="x", identity="c0ffee", memory_free_bytes=8, memory_total_bytes=16)
    return SystemView(cpu=cpu, nvml=NvmlView(), torch=torch)


def test_the_link_of_a_machines_device() -> None:
    view = machine(TorchDevice(index=3, name="NVIDIA H200", uuid=UUID.removeprefix("GPU-")))
    device = Device(
        backend="cuda", index=3, name="NVIDIA H200", uuid_hash=None, sku="h200-sxm-141gb", family="h200", known=True
    )
    found = link_of(device, view, library=FakeNvml(links=(True,) * 18)).link
    assert found is not None
    assert found.bytes_per_s == 450e9
    assert link_of(msgspec.structs.replace(device, index=4), view, library=FakeNvml()).link is None


def test_the_slowest_link_bounds_the_ranks() -> None:
    whole = read(FakeNvml(links=(True,) * 18), "h200-sxm-141gb")
    down = read(FakeNvml(links=(True,) * 17 + (False,)), "h200-sxm-141gb")
    assert common_link([whole, down, whole]) == down
    assert common_link([whole]) == whole


def test_links_that_differ_in_kind_bound_nothing() -> None:
    switch, card = read(FakeNvml(links=(True,) * 18)), read(FakeNvml())
    assert (common_link([switch, card]).reason or "").startswith("the ranks' links differ: ")
    assert common_link([switch, LinkView(reason="refused")]).reason == "refused"
    assert common_link([]).link is None


def test_a_link_is_plain_json() -> None:
    view = read(FakeNvml(links=(True,) * 18))
    assert msgspec.json.decode(msgspec.json.encode(view), type=LinkView) == view
