"""Every conversion between units, and how quantities are written for people."""

from __future__ import annotations

import math

NS_PER_S = 1_000_000_000
US_PER_S = 1_000_000
GB = 1_000_000_000
MIB = 1024**2
GIB = 1024**3
TERA = 1e12
GIGA = 1e9

_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))


def ns_to_s(ns: float) -> float:
    """Nanoseconds to seconds."""
    return ns / NS_PER_S


def s_to_us(s: float) -> float:
    """Seconds to microseconds."""
    return s * US_PER_S


def us_to_s(us: float) -> float:
    """Microseconds to seconds."""
    return us / US_PER_S


def ms_to_s(ms: float) -> float:
    """Milliseconds to seconds (device events count in milliseconds)."""
    return ms / 1e3


def tera_to_per_s(tera: float) -> float:
    """TFLOP/s or TOPS of a data sheet to operations per second."""
    return tera * TERA


def mhz_to_hz(mhz: float) -> float:
    """Megahertz to hertz."""
    return mhz * 1e6


def mw_to_w(mw: float) -> float:
    """Milliwatts (as NVML counts power) to watts."""
    return mw / 1e3


def gb_to_bytes(gb: float) -> float:
    """Decimal gigabytes to bytes."""
    return gb * GB


def _three_digits(value: float) -> str:
    """Three significant digits, never in scientific notation."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def format_si(value: float, unit: str) -> str:
    """A quantity with a decimal prefix and three digits: ``format_si(3.12e14, "FLOP/s")`` is ``312 TFLOP/s``."""
    for factor, prefix in _DECIMAL:
        if abs(value) >= factor * 0.9995:
            return f"{_three_digits(value / factor)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def format_bytes(nbytes: float) -> str:
    """Memory in binary units: ``1.50 GiB``."""
    for factor, unit in _BINARY:
        if abs(nbytes) >= factor:
            return f"{_three_digits(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"


def format_time_us(time_us: float) -> str:
    """A duration given in microseconds, in the unit that reads best: ``12.0 ms``."""
    if time_us < 1:
        return f"{_three_digits(time_us * 1e3)} ns"
    if time_us < 1e3:
        return f"{_three_digits(time_us)} us"
    if time_us < 1e6:
        return f"{_three_digits(time_us / 1e3)} ms"
    return f"{_three_digits(time_us / 1e6)} s"


def format_percent(fraction: float, digits: int = 1) -> str:
    """A fraction as a percentage: ``0.735`` is ``73.5 %``."""
    return f"{fraction * 100:.{digits}f} %"
