"""The most that a collective's bus bandwidth can be, where operation and topology allow saying so. Pure arithmetic.

The derivations, with numbers, are in docs/clusters.md. S is the operation's size as bus bandwidth counts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perfsuite import units
from perfsuite.errors import CaseError
from perfsuite.hardware.links import Link
from perfsuite.utilization import busbw_factor

_NVLS, _SHARP = "NVLS", "SHARP"
_MESHES = ("nvlink_mesh", "xgmi_mesh")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a bus bandwidth may be held against; ``bytes_per_s`` is None where nothing can be said, and why.

    ``may_exceed`` names what can lift the measured value above it: then that value is no fault up to
    ``limit_bytes_per_s``, which nothing passes. Without it the two are the same.
    """

    bytes_per_s: float | None
    detail: str
    may_exceed: str | None = None
    limit_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Term:
    """One bound of several: its bytes per second, those with reduction in the network, and what it is made of."""

    plain: float
    reduced: float
    detail: str


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The ranks of an operation and their nodes, each with as many."""

    operation: str
    ranks: int
    nodes: int

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def factor(self) -> float:
        return busbw_factor(self.operation, self.ranks)


def bound(
    operation: str,
    *,
    ranks: int,
    nodes: int,
    link: Link | None,
    network_bytes_per_s: float | None,
    even: bool = True,
) -> Bound:
    """The most that the bus bandwidth of ``operation`` over ``ranks`` on ``nodes`` can be.

    ``link`` joins the ranks of a node (the slowest of them); ``network_bytes_per_s`` is what a node can send, and as
    much receive, as the user states it. ``even``: each node has as many ranks, in a row, as torchrun places them. A
    CaseError for an unknown operation or counts that cannot be.
    """
    factor = busbw_factor(operation, ranks)
    if not 1 <= nodes <= ranks:
        raise CaseError(f"nodes={nodes} must be 1 to ranks={ranks}")
    if network_bytes_per_s is not None and not 0 < network_bytes_per_s < math.inf:
        raise CaseError(f"network_bytes_per_s={network_bytes_per_s:g} must be a positive number")
    if factor == 0:
        return _nothing("one rank moves nothing")
    layout = _Layout(operation=operation, ranks=ranks, nodes=nodes)
    if nodes == 1:
        return _inside(layout, link)
    if not even or ranks % nodes:
        return _nothing("the nodes have unequal numbers of ranks")
    if network_bytes_per_s is None:
        return _nothing(f"{nodes} nodes, and no network peak is stated")
    return _across(layout, link, network_bytes_per_s)


def _nothing(detail: str) -> Bound:
    return Bound(bytes_per_s=None, detail=detail)


def _inside(layout: _Layout, link: Link | None) -> Bound:
    """One node: what a rank's link carries."""
    if link is None:
        return _nothing("the link between the ranks is not known")
    refusal = _mesh_refusal(layout, link)
    if refusal is not None:
        return _nothing(refusal)
    term = _rank_term(layout, link.bytes_per_s, link.detail)
    return _tightest([term], [_NVLS] if link.reduces else [])


def _across(layout: _Layout, link: Link | None, network_bytes_per_s: float) -> Bound:
    """Several nodes: what must cross a node's boundary, and what a rank's ways out carry together."""
    terms = [_boundary_term(layout, network_bytes_per_s)]
    if link is not None and layout.ranks_per_node > 1 and _mesh_refusal(layout, link) is None:
        terms.append(_ways_out_term(layout, link, network_bytes_per_s))
    return _tightest(terms, [_NVLS, _SHARP] if link is not None and link.reduces else [_SHARP])


def _mesh_refusal(layout: _Layout, link: Link) -> str | None:
    """Why a mesh bounds nothing here: only all of its GPUs together use all of a GPU's links."""
    if link.kind not in _MESHES or link.peers is None:
        return None
    gpus, ranks = link.peers + 1, layout.ranks_per_node
    if ranks != gpus:
        return f"a mesh of {gpus} GPUs, and {ranks} ranks on a node: how many links they use is not known"
    if layout.operation == "send_recv" and link.peers > 1:
        return "a mesh, and each rank sends to one other: how many links it uses is not known"
    return None


def _rank_term(layout: _Layout, rank_bytes_per_s: float, detail: str) -> _Term:
    """What a rank can send, or receive, bounds the bus bandwidth itself.

    Without reduction on the way the ranks of an all_reduce send 2(n-1) S together. With it a rank sends and receives
    S at least, since all others depend on what it has.
    """
    lift = layout.factor if layout.operation == "all_reduce" else 1.0
    return _Term(plain=rank_bytes_per_s, reduced=rank_bytes_per_s * lift, detail=detail)


def _ways_out_term(layout: _Layout, link: Link, network_bytes_per_s: float) -> _Term:
    """A rank's link and its part of the network; over PCIe the network's traffic is the link's too."""
    if link.kind == "pcie":
        return _rank_term(layout, link.bytes_per_s, link.detail)
    share_bytes_per_s = network_bytes_per_s / layout.ranks_per_node
    detail = f"{link.detail}; and {units.format_si(share_bytes_per_s, 'B/s')} of network per rank"
    return _rank_term(layout, link.bytes_per_s + share_bytes_per_s, detail)


def _boundary_term(layout: _Layout, network_bytes_per_s: float) -> _Term:
    """The stated network peak, turned into bus bandwidth by the least that has to cross a node's boundary."""
    crossing, reduced_crossing = _crossing(layout)
    detail = (
        f"network of {units.format_si(network_bytes_per_s, 'B/s')} per node and direction, as stated: "
        f"{layout.operation} over {layout.ranks} ranks on {layout.nodes} nodes moves {crossing:.4g} S across "
        "a node's boundary"
    )
    return _Term(
        plain=network_bytes_per_s * layout.factor / crossing,
        reduced=network_bytes_per_s * layout.factor / reduced_crossing,
        detail=detail,
    )


def _crossing(layout: _Layout) -> tuple[float, float]:
    """The least that a node sends, or receives, in multiples of S; the second with reduction in the network.

    all_reduce: N nodes that each need what all have exchange 2(N-1) messages at least (gossip, one way), so 2(N-1)/N
    per node on average. With reduction in the network a node sends and receives S. reduce_scatter: a node sends its
    part of every sum that another node keeps. all_gather: it receives what the others have. all_to_all: each of its
    g ranks sends S/n to each of the n - g ranks elsewhere. broadcast: a node without the root receives S; reduce: it
    sends S. send_recv in a ring of ranks: one of a node's ranks sends to another node.
    """
    others = (layout.nodes - 1) / layout.nodes
    if layout.operation == "all_reduce":
        return 2 * others, 1.0
    crossing = {
        "reduce_scatter": others,
        "all_gather": others,
        "all_to_all": layout.ranks_per_node * others,
    }.get(layout.operation, 1.0)
    return crossing, crossing


def _tightest(terms: Sequence[_Term], reducers: Sequence[str]) -> Bound:
    """The smallest of the terms, and how far reduction by one of ``reducers`` may lift a value above it."""
    smallest = min(terms, key=lambda term: term.plain)
    limit_bytes_per_s = min(term.reduced for term in terms) if reducers else smallest.plain
    # A difference of rounding alone is none.
    lifts = limit_bytes_per_s > smallest.plain * (1 + 1e-9)
    return Bound(
        bytes_per_s=smallest.plain,
        detail=smallest.detail,
        may_exceed=f"in-network reduction ({' or '.join(reducers)})" if lifts else None,
        limit_bytes_per_s=limit_bytes_per_s if lifts else smallest.plain,
    )
