"""What a device's name says: text, a slug for its SKU, and whether it is only part of a card."""

from __future__ import annotations

import re

_MARKS = re.compile(r"\((?:R|TM|C)\)", re.IGNORECASE)
_CLOCK = re.compile(r"(?:\bCPU\s*)?@\s*[\d.]+\s*[GM]Hz", re.IGNORECASE)
_NOT_SLUG = re.compile(r"[^a-z0-9]+")

# The profile letters of NVIDIA's vGPU software end the name: "A100-4-20C", "L4-24Q", "H100-1-10CME", "L4-24".
_PARTS = (
    (re.compile(r"\bMIG\b", re.IGNORECASE), "a MIG slice"),
    (re.compile(r"\bGRID\b|\bvGPU\b|-\d+(?:[ABQ]4?|C(?:ME)?)?$", re.IGNORECASE), "a virtual GPU"),
    (re.compile(r"\bVF\b|\bMxGPU\b", re.IGNORECASE), "a virtual GPU"),
    (re.compile(r"\bLaptop\b|\bMax-Q\b|\bMobile\b|\bNotebook\b", re.IGNORECASE), "a laptop part"),
)
_GENERIC = frozenset({"", "device", "graphics device", "nvidia graphics device", "amd radeon graphics"})


def text_of(value: str | bytes) -> str:
    """A name as text: bytes decoded, surrounding white space and NULs removed, nothing else changed."""
    text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
    return text.strip(" \t\r\n\0")


def slug(name: str) -> str:
    """A name as a SKU: ``Intel(R) Xeon(R) CPU @ 2.20GHz`` is ``intel-xeon``."""
    plain = _CLOCK.sub(" ", _MARKS.sub(" ", name)).lower()
    return _NOT_SLUG.sub("-", plain).strip("-") or "unnamed"


def part_of(name: str) -> str | None:
    """What part of a card ``name`` is (``a MIG slice``, ``a virtual GPU``, ``a laptop part``); None for a whole one."""
    return next((what for pattern, what in _PARTS if pattern.search(name)), None)


def is_generic(name: str) -> bool:
    """Whether a driver gave a name that names no product, as it does for hardware newer than itself."""
    return name.casefold() in _GENERIC


def without_vendor(name: str) -> str:
    """``NVIDIA A10`` as drivers before release 470 called it: ``A10``."""
    return name.removeprefix("NVIDIA ")
