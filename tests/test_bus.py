"""The PCI bus and the device nodes: GPUs that torch may not be able to use."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.hardware.bus import has_gpu_node, read_bus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def on_bus(root: Path, address: str, vendor: str, device: str, class_: str) -> None:
    folder = f"sys/bus/pci/devices/{address}"
    write(root, {f"{folder}/vendor": vendor, f"{folder}/device": device, f"{folder}/class": class_})


def test_the_bus_shows_compute_gpus_and_no_other_graphics(tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:02.0", "0x8086\n", "0x3e92\n", "0x030000\n")  # integrated graphics
    on_bus(tmp_path, "0000:01:00.0", "0x1002\n", "0x1638\n", "0x030000\n")  # an APU's graphics
    on_bus(tmp_path, "0000:02:00.0", "0x10de\n", "0x228b\n", "0x040300\n")  # the audio device of a GPU
    on_bus(tmp_path, "0000:02:00.1", "0x10de\n", "0x2684\n", "0x030000\n")
    on_bus(tmp_path, "0000:07:00.0", "0x10DE\n", "0x20B0\n", "0x030200\n")
    on_bus(tmp_path, "0000:83:00.0", "0x1002\n", "0x74a1\n", "0x120000\n")
    on_bus(tmp_path, "0000:9a:00.0", "0x8086\n", "0x0bd5\n", "0x038000\n")
    write(tmp_path, {"sys/bus/pci/devices/0000:ff:00.0/vendor": "0x10de\n"})
    found = read_bus(tmp_path)
    assert [each.pci_id for each in found] == ["10de:2684", "10de:20b0", "1002:74a1", "8086:0bd5"]
    assert read_bus(tmp_path / "nothing") == ()


@pytest.mark.parametrize("node", ["dev/nvidiactl", "dev/nvhost-gpu", "dev/kfd", "dev/dxg"])
def test_a_driver_node_hints_at_a_gpu(tmp_path: Path, node: str) -> None:
    assert not has_gpu_node(tmp_path)
    write(tmp_path, {node: ""})
    assert has_gpu_node(tmp_path)


@pytest.mark.parametrize(("bus", "discrete"), [("00:02.0", False), ("03:00.0", True)])
def test_only_a_discrete_intel_render_node_hints_at_a_gpu(tmp_path: Path, bus: str, discrete: bool) -> None:
    device = tmp_path / f"sys/devices/pci/0000:{bus}"
    write(device, {"vendor": "0x8086\n"})
    node = tmp_path / "sys/class/drm/renderD128"
    node.mkdir(parents=True)
    (node / "device").symlink_to(device)
    assert has_gpu_node(tmp_path) is discrete
