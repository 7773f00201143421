"""The catalogue of known hardware: sourced data-sheet peaks, looked up by exact name only."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from perfsuite import units
from perfsuite.errors import CaseError, FileError, HardwareError
from perfsuite.hardware.names import text_of

CATALOGUE = Path(__file__).with_name("catalogue.toml")

Positive = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(gt=0)]
Sku = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
PciId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{4}:[0-9a-f]{4}$")]
PeakDType = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4"]
PEAK_DTYPES: tuple[PeakDType, ...] = get_args(PeakDType)

# What plain arithmetic units run; the other peaks are the matrix units' and say nothing about element-wise work.
_VECTOR_DTYPES = ("fp64", "fp32")


class Peaks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dense peaks in TFLOP/s, for int8 in TOPS; None is not known or not supported."""

    basis: Literal["dense"]
    fp64: Positive | None = None
    fp64_tensor: Positive | None = None
    fp32: Positive | None = None
    tf32: Positive | None = None
    fp16: Positive | None = None
    bf16: Positive | None = None
    fp8: Positive | None = None
    int8: Positive | None = None
    fp4: Positive | None = None


class Chip(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The chip: compute capability or gfx name, SMs (compute units), boost clock, 16-bit FLOP per clock and SM."""

    compute_capability: str
    sm: PositiveInt | None = None
    boost_mhz: Positive | None = None
    flop_per_clock_per_sm: PositiveInt | None = None


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Capacity in decimal GB and bandwidth in GB/s."""

    gb: Positive
    gb_per_s: Positive


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GB/s per direction, summed over a GPU's links, and its PCIe generation."""

    gb_per_s_per_direction: Positive | None = None
    pcie_gen: PositiveInt | None = None


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One SKU and its data sheet."""

    sku: Sku
    family: Sku
    device_names: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    pci_device_ids: tuple[PciId, ...] = ()
    chip: Chip
    memory: Memory
    link: Link
    peaks: Peaks
    torch_devices: PositiveInt = 1
    sources: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    note: str = ""

    def flops_per_s(self, dtype: str, *, matmul: bool = True) -> float | None:
        """The dense peak for ``dtype`` in operations per second, or None where it is not known.

        fp64 matmul is held against the tensor rate where there is one. Without ``matmul`` only fp64 and fp32 have a
        peak: the other rates are those of matrix units. int8 counts operations, not FLOPs.
        """
        if dtype not in PEAK_DTYPES:
            raise CaseError(f"dtype={dtype!r} has no peaks; use one of {', '.join(PEAK_DTYPES)}")
        if not matmul and dtype not in _VECTOR_DTYPES:
            return None
        tera = self._tera(dtype, matmul=matmul)
        return None if tera is None else units.tera_to_per_s(tera)

    def _tera(self, dtype: str, *, matmul: bool) -> float | None:
        if dtype == "fp64" and matmul and self.peaks.fp64_tensor is not None:
            return self.peaks.fp64_tensor
        value: float | None = getattr(self.peaks, dtype)
        return value

    def dtypes(self) -> tuple[str, ...]:
        """The data types that have a peak here."""
        return tuple(dtype for dtype in PEAK_DTYPES if self.flops_per_s(dtype) is not None)

    @property
    def memory_bytes(self) -> float:
        """Memory capacity in bytes."""
        return units.gb_to_bytes(self.memory.gb)

    @property
    def memory_bytes_per_s(self) -> float:
        """Memory bandwidth in bytes per second."""
        return units.gb_to_bytes(self.memory.gb_per_s)

    @property
    def link_bytes_per_s(self) -> float | None:
        """Link bandwidth per direction in bytes per second, or None where it is not known."""
        per_direction = self.link.gb_per_s_per_direction
        return None if per_direction is None else units.gb_to_bytes(per_direction)

    def cross_check_flops_per_s(self) -> float | None:
        """The 16-bit matmul peak that SM count, FLOP per clock and SM, and boost clock give; None where one is missing.

        A check on the data sheet, never a ceiling: power-capped cards stay 8 to 16 % below it.
        """
        chip = self.chip
        if chip.sm is None or chip.boost_mhz is None or chip.flop_per_clock_per_sm is None:
            return None
        return chip.sm * chip.flop_per_clock_per_sm * units.mhz_to_hz(chip.boost_mhz)

    def clock_scale(self, max_clock_mhz: float | None) -> float:
        """How far a device whose maximum clock is ``max_clock_mhz`` may pass the data sheet: 1 or more.

        Below the boost clock, or where either clock is unknown, it is 1: a slow clock never lowers a peak.
        """
        if max_clock_mhz is None or self.chip.boost_mhz is None:
            return 1.0
        return max(1.0, max_clock_mhz / self.chip.boost_mhz)

    def per_torch_device(self) -> Hardware:
        """The share of one torch device: an MI250X shows its two dies as two, each half of the package.

        The link figure is left out then: what one die has of the package's links is not known.
        """
        count = self.torch_devices
        if count == 1:
            return self
        share = {name: value / count for name, value in _numbers(self.peaks)}
        sm = None if self.chip.sm is None else self.chip.sm // count
        return msgspec.structs.replace(
            self,
            peaks=Peaks(basis=self.peaks.basis, **share),
            chip=msgspec.structs.replace(self.chip, sm=sm),
            memory=Memory(gb=self.memory.gb / count, gb_per_s=self.memory.gb_per_s / count),
            link=Link(pcie_gen=self.link.pcie_gen),
            torch_devices=1,
        )


def _numbers(peaks: Peaks) -> Iterator[tuple[str, float]]:
    for name, value in msgspec.structs.asdict(peaks).items():
        if isinstance(value, int | float):
            yield name, value


class Catalogue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every SKU that is known, and the look-ups, all of them exact."""

    schema: Literal[1]
    sources: dict[str, str]
    ambiguous_device_names: dict[str, tuple[str, ...]] = {}
    hardware: tuple[Hardware, ...]

    def by_sku(self, sku: str) -> Hardware | None:
        """The row of ``sku``, or None."""
        return next((row for row in self.hardware if row.sku == sku), None)

    def candidates(self, name: str | bytes) -> tuple[Hardware, ...]:
        """The rows that a device name can mean: none, one, or several where the name does not say which."""
        text = text_of(name)
        skus = self.ambiguous_device_names.get(text, ())
        return tuple(row for row in self.hardware if text in row.device_names or row.sku in skus)

    def by_device_name(self, name: str | bytes) -> Hardware | None:
        """The row whose device name is exactly ``name``, or None; a HardwareError where the name is ambiguous."""
        rows = self.candidates(name)
        if len(rows) > 1:
            raise HardwareError(ambiguity(text_of(name), rows))
        return rows[0] if rows else None

    def by_pci_id(self, pci_id: str) -> Hardware | None:
        """The row with this PCI ``vendor:device`` (hexadecimal, as in ``10de:20b0``), or None."""
        wanted = pci_id.lower()
        return next((row for row in self.hardware if wanted in row.pci_device_ids), None)

    def find(self, text: str) -> tuple[Hardware, ...]:
        """The rows that a request names: one for a SKU, all of a family, those of an exact device name; else none."""
        wanted = text.strip().lower()
        exact = self.by_sku(wanted)
        if exact is not None:
            return (exact,)
        family = tuple(row for row in self.hardware if row.family == wanted)
        return family or self.candidates(text)

    def resolve(self, text: str) -> tuple[Hardware, ...]:
        """As ``find``, but a HardwareError that offers near names where nothing is called so."""
        rows = self.find(text)
        if rows:
            return rows
        near = self.near(text)
        hint = f"near: {', '.join(near)}; " if near else ""
        raise HardwareError(f"{text!r} is not known hardware; {hint}`perfsuite hardware` lists every SKU")

    def near(self, text: str) -> tuple[str, ...]:
        """Up to four SKUs and families spelled like ``text``, nearest first."""
        import difflib

        names = sorted({row.family for row in self.hardware} | {row.sku for row in self.hardware})
        return tuple(difflib.get_close_matches(text.strip().lower(), names, n=4, cutoff=0.6))

    def families(self) -> tuple[str, ...]:
        """Every family, in the file's order."""
        return tuple(dict.fromkeys(row.family for row in self.hardware))


def ambiguity(name: str, rows: Iterable[Hardware]) -> str:
    """The one line that asks for a SKU."""
    return f"{name!r} does not say which SKU it is: name one of {', '.join(row.sku for row in rows)}"


def parse(data: bytes, *, source: str) -> Catalogue:
    """A catalogue from TOML; a FileError that names ``source`` and the field where it is wrong."""
    try:
        catalogue = msgspec.toml.decode(data, type=Catalogue)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{source}: {_field_first(str(error))}") from None
    for fault in _faults(catalogue):
        raise FileError(f"{source}: {fault}")
    return catalogue


def _field_first(message: str) -> str:
    """msgspec's message on one line."""
    return re.sub(r"\s+", " ", message)


def _faults(catalogue: Catalogue) -> Iterator[str]:
    """What types cannot say: names that occur twice, sources and SKUs that nothing defines."""
    rows = catalogue.hardware
    yield from _repeated("sku", (row.sku for row in rows))
    yield from _repeated("device_names", (name for row in rows for name in row.device_names))
    yield from _repeated("pci_device_ids", (pci_id for row in rows for pci_id in row.pci_device_ids))
    for row in rows:
        for unknown in sorted(set(row.sources) - set(catalogue.sources)):
            yield f"hardware {row.sku}: source {unknown!r} is not in [sources]"
        if row.sku != row.family and row.sku in catalogue.families():
            yield f"hardware {row.sku}: this SKU is also a family; choose another name"
    for name, skus in catalogue.ambiguous_device_names.items():
        for unknown in sorted(set(skus) - {row.sku for row in rows}):
            yield f"ambiguous_device_names {name!r}: {unknown!r} is no SKU"


def _repeated(field: str, values: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            yield f"{field}: {value!r} occurs twice"
        seen.add(value)


@functools.cache
def load() -> Catalogue:
    """The catalogue that comes with perfsuite; read once per process."""
    return parse(CATALOGUE.read_bytes(), source=CATALOGUE.name)
