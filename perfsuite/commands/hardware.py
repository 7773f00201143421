"""``perfsuite hardware``: what is here, what is listed, and the data sheet of one SKU with its sources."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from perfsuite import units
from perfsuite.commands.console import facts, output
from perfsuite.errors import HardwareError
from perfsuite.hardware.catalogue import PEAK_DTYPES, Catalogue, Hardware, load
from perfsuite.hardware.device import Device, SystemView, cpu_device, gpu_devices
from perfsuite.hardware.selection import gather, select, unusable_gpu

_LIST_DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
_LIST_TITLE = "Listed: dense peaks in TFLOP/s (int8 in TOPS), memory; - is unknown"

Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="A SKU, a family, or a device's exact name.")]


def hardware(name: Name = None) -> None:
    """Without NAME: what is detected here, and every SKU. With it: peaks, sources and cross-check."""
    console, catalogue = output(), load()
    if name is None:
        _print_here(console, gather(), catalogue)
        console.print()
        console.print(_LIST_TITLE, style="bold")
        console.print(_listing(catalogue))
        return
    rows = catalogue.find(name)
    for number, row in enumerate(rows):
        if number:
            console.print()
        console.print(_sheet(row, catalogue))
    if not rows:
        console.print(_device_facts(_unlisted(name, catalogue)))


def _unlisted(name: str, catalogue: Catalogue) -> Device:
    """A device of this machine that the catalogue lacks; a HardwareError with near names where none is called so."""
    try:
        return select(name, view=gather(name))
    except HardwareError:
        catalogue.resolve(name)
        raise


def _print_here(console: Console, view: SystemView, catalogue: Catalogue) -> None:
    console.print("Here", style="bold")
    for device in (*gpu_devices(view, catalogue), cpu_device(view.cpu)):
        console.print(_device_facts(device))
    problem = unusable_gpu(view)
    if problem is not None:
        console.print(f"Warning: {problem}", style="yellow")


def _device_facts(device: Device) -> Table:
    """A detected device: name, memory, clock, whether its peaks are known."""
    table = facts()
    title = device.sku if device.backend == "cpu" else f"{device.sku} ({device.backend}:{device.index})"
    table.add_row(title, device.name)
    table.add_row("  memory", _memory(device))
    if device.sm_count is not None:
        table.add_row("  SMs", str(device.sm_count))
    if device.max_clock_mhz is not None:
        table.add_row("  maximum clock", f"{device.max_clock_mhz:g} MHz")
    if device.driver_version is not None:
        table.add_row("  driver", device.driver_version)
    ceilings = "dense data-sheet peaks" if device.known else device.unknown_reason
    table.add_row("  ceilings", ceilings)
    return table


def _memory(device: Device) -> str:
    if device.memory_total_bytes is None:
        return f"unknown ({device.missing.get('memory_total_bytes', 'not told')})"
    total = units.format_bytes(device.memory_total_bytes)
    if device.memory_free_bytes is None:
        return total
    return f"{total}, {units.format_bytes(device.memory_free_bytes)} free"


def _listing(catalogue: Catalogue) -> Table:
    """Every SKU, one line each."""
    table = Table(box=None, pad_edge=False)
    table.add_column("SKU", no_wrap=True)
    for heading in (*_LIST_DTYPES, "GB", "GB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in catalogue.hardware:
        peaks = (_tera(row, dtype) for dtype in _LIST_DTYPES)
        table.add_row(row.sku, *peaks, f"{row.memory.gb:g}", f"{row.memory.gb_per_s:g}")
    return table


def _tera(row: Hardware, dtype: str) -> str:
    """The matmul peak as the sheet writes it."""
    peak = row.flops_per_s(dtype)
    return "-" if peak is None else f"{peak / units.TERA:g}"


def _sheet(row: Hardware, catalogue: Catalogue) -> Table:
    """One SKU in full."""
    table = facts()
    table.add_row("SKU", f"{row.sku} (family {row.family})")
    table.add_row("Names", ", ".join(row.device_names))
    table.add_row("PCI ids", ", ".join(row.pci_device_ids) or "-")
    table.add_row("Chip", _chip(row))
    table.add_row("Memory", f"{row.memory.gb:g} GB, {row.memory.gb_per_s:g} GB/s")
    table.add_row("Links", _links(row))
    table.add_row("Basis", f"{row.peaks.basis}, never 2:4-sparse")
    for dtype in PEAK_DTYPES:
        table.add_row(f"  {dtype}", _peak(row, dtype))
    table.add_row("Cross-check", _cross_check(row))
    table.add_row("Sources", "; ".join(catalogue.sources[source] for source in row.sources))
    table.add_row("Note", row.note or "-")
    return table


def _chip(row: Hardware) -> str:
    parts = [row.chip.compute_capability]
    if row.chip.sm is not None:
        parts.append(f"{row.chip.sm} {_units(row)}")
    if row.chip.boost_mhz is not None:
        parts.append(f"boost {row.chip.boost_mhz:g} MHz")
    if row.torch_devices > 1:
        parts.append(f"a package; each of its {row.torch_devices} torch devices has its share")
    return ", ".join(parts)


def _units(row: Hardware) -> str:
    return "compute units" if row.chip.compute_capability.startswith("gfx") else "SMs"


def _links(row: Hardware) -> str:
    speed = row.link.gb_per_s_per_direction
    links = "none known" if speed is None else f"{speed:g} GB/s per direction"
    return links if row.link.pcie_gen is None else f"{links}; PCIe generation {row.link.pcie_gen}"


def _peak(row: Hardware, dtype: str) -> str:
    peak = row.flops_per_s(dtype)
    if peak is None:
        return "-"
    text = f"{peak / units.TERA:g} {'TOPS' if dtype == 'int8' else 'TFLOP/s'}"
    vector = row.flops_per_s(dtype, matmul=False)
    if dtype == "fp64" and vector != peak and vector is not None:
        return f"{text} matmul, {vector / units.TERA:g} otherwise"
    return text


def _cross_check(row: Hardware) -> str:
    """SM count x FLOP per clock and SM x boost clock, against the 16-bit peak."""
    computed = row.cross_check_flops_per_s()
    peak = row.flops_per_s("bf16") or row.flops_per_s("fp16")
    if computed is None or peak is None:
        return "not possible: SM count, boost clock or FLOP per clock is not known"
    chip = row.chip
    product = f"{chip.sm} SMs x {chip.flop_per_clock_per_sm} FLOP x {chip.boost_mhz:g} MHz"
    return f"{product} = {computed / units.TERA:.1f} TFLOP/s, {computed / peak:.2f} of the 16-bit peak"
