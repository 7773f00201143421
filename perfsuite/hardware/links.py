"""What joins a GPU to the others of its node, and what that can carry in one direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from perfsuite import units
from perfsuite.hardware.catalogue import Hardware

LinkKind = Literal["nvlink_switch", "nvlink_mesh", "pcie", "xgmi_mesh"]

# GB/s per NVLink and direction, by NVML's code of the version (6 is NVLink 4.0, 7 is 5.0), which is no version number.
_NVLINK_GB_PER_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0}
# What the chip says against the code: the links of compute capability 8.6 are narrower than those of 8.0 (an A40's
# 56.25 GB/s are four of them), and drivers have told version 5.0 of Hopper's 4.0.
_CHIP_GB_PER_S = {(8, 6): 14.0625, (9, 0): 25.0}
# The first NVLink switch that reduces (NVLS) is Hopper's.
_REDUCING_CAPABILITY, _REDUCING_VERSION = (9, 0), 6

# GB/s per PCIe lane and direction, after the line code.
_PCIE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's way to the other GPUs of its node.

    ``bytes_per_s`` is per direction, summed over the GPU's links. ``peers`` is how many GPUs a mesh joins it to
    directly, and None elsewhere. ``reduces`` means that the switch can add up what passes through it.
    """

    kind: LinkKind
    bytes_per_s: float
    detail: str
    peers: int | None = None
    reduces: bool = False


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """A device's link, or None and the reason."""

    link: Link | None = None
    reason: str | None = None


def nvlink(
    *,
    active: int,
    version: int,
    peers: int | None,
    capability: tuple[int, int] | None = None,
    row: Hardware | None = None,
) -> LinkView:
    """``active`` NVLinks of the ``version`` that NVML's code says, to ``peers`` GPUs or (None) to a switch.

    The data sheet of ``row`` is an upper end: fewer active links are told in the detail, a higher product is cut.
    """
    each_gb_per_s = _CHIP_GB_PER_S.get(capability or (0, 0), _NVLINK_GB_PER_S.get(version))
    if each_gb_per_s is None:
        return LinkView(reason=f"NVML's NVLink version code {version} is not known")
    sheet_bytes_per_s = None if row is None else row.link_bytes_per_s
    told_bytes_per_s = units.gb_to_bytes(active * each_gb_per_s)
    detail = f"{active} NVLinks x {each_gb_per_s:g} GB/s per direction, {_far_end(peers)}"
    if sheet_bytes_per_s is not None:
        detail += _difference(told_bytes_per_s, sheet_bytes_per_s, each_gb_per_s)
    link = Link(
        kind="nvlink_switch" if peers is None else "nvlink_mesh",
        bytes_per_s=told_bytes_per_s if sheet_bytes_per_s is None else min(told_bytes_per_s, sheet_bytes_per_s),
        peers=peers,
        reduces=peers is None and _reduces(capability, version),
        detail=detail,
    )
    return LinkView(link=link)


def _far_end(peers: int | None) -> str:
    if peers is None:
        return "through a switch"
    return f"to {peers} GPU{'' if peers == 1 else 's'}"


def _difference(told_bytes_per_s: float, sheet_bytes_per_s: float, each_gb_per_s: float) -> str:
    """What to say where NVML and the data sheet differ by more than rounding."""
    sheet = units.format_si(sheet_bytes_per_s, "B/s")
    if told_bytes_per_s > sheet_bytes_per_s * 1.001:
        return f"; the data sheet has {sheet}, which is taken"
    if told_bytes_per_s < sheet_bytes_per_s * 0.999:
        whole = round(sheet_bytes_per_s / units.gb_to_bytes(each_gb_per_s))
        return f"; the data sheet has {sheet}, that is {whole} links: the others are not active"
    return ""


def _reduces(capability: tuple[int, int] | None, version: int) -> bool:
    """Whether the switch of this generation reduces; by the chip, else by the links' version."""
    if capability is not None:
        return capability >= _REDUCING_CAPABILITY
    return version >= _REDUCING_VERSION


def pcie(*, generation: int, width: int, now_generation: int | None = None, why: str = "") -> LinkView:
    """A PCIe link of ``width`` lanes; a slower ``now_generation`` is told, since links slow down when idle."""
    lane_gb_per_s = _PCIE_GB_PER_S.get(generation)
    if lane_gb_per_s is None or width < 1:
        return LinkView(reason=f"PCIe generation {generation} with {width} lanes is not known")
    detail = f"PCIe {generation}.0 x{width}, an upper bound: GPUs may share switches and the host's bridges"
    if now_generation is not None and now_generation < generation:
        detail += f"; read while at generation {now_generation}, as when idle"
    bytes_per_s = units.gb_to_bytes(lane_gb_per_s * width)
    return LinkView(link=Link(kind="pcie", bytes_per_s=bytes_per_s, detail=detail + why))


def xgmi(*, peers: int, row: Hardware | None) -> LinkView:
    """The data sheet's xGMI links of a GPU that reaches ``peers`` others directly."""
    sheet_bytes_per_s = None if row is None else row.link_bytes_per_s
    if row is None or sheet_bytes_per_s is None:
        return LinkView(reason="the catalogue has no figure for this device's xGMI links")
    if peers < 1:
        return LinkView(reason="no xGMI link to another GPU is there")
    detail = f"{row.sku} xGMI links per direction, {_far_end(peers)}"
    return LinkView(link=Link(kind="xgmi_mesh", bytes_per_s=sheet_bytes_per_s, peers=peers, detail=detail))


def common_link(views: Sequence[LinkView]) -> LinkView:
    """The slowest of the ranks' links, which bounds them all; None where one is not known or their kinds differ."""
    links = [view.link for view in views if view.link is not None]
    if len(links) < len(views) or not links:
        return LinkView(reason=next((view.reason for view in views if view.link is None), "no rank told its link"))
    if len({(link.kind, link.peers, link.reduces) for link in links}) > 1:
        return LinkView(reason=f"the ranks' links differ: {', '.join(sorted({link.detail for link in links}))}")
    return LinkView(link=min(links, key=lambda link: link.bytes_per_s))
