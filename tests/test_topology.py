"""Bounds of bus bandwidth: numbers worked out by hand, and nothing where nothing can be said."""

from __future__ import annotations

import pytest

from perfsuite.errors import CaseError
from perfsuite.hardware.links import Link, LinkKind
from perfsuite.topology import Bound, bound
from perfsuite.utilization import COLLECTIVE_OPS

OPERATIONS = sorted(COLLECTIVE_OPS)
NETWORK = 400e9


def link(kind: LinkKind = "nvlink_switch", gb_per_s: float = 450, *, peers: int | None = None) -> Link:
    return Link(kind=kind, bytes_per_s=gb_per_s * 1e9, peers=peers, reduces=kind == "nvlink_switch", detail="a link")


SWITCH = link()
OLD_SWITCH = Link(kind="nvlink_switch", bytes_per_s=300e9, detail="an older switch")
PCIE = link("pcie", 31.504)


def inside(operation: str, ranks: int, joined: Link | None = SWITCH) -> Bound:
    return bound(operation, ranks=ranks, nodes=1, link=joined, network_bytes_per_s=None)


def across(
    operation: str, ranks: int, nodes: int, joined: Link | None = None, network: float | None = NETWORK
) -> Bound:
    return bound(operation, ranks=ranks, nodes=nodes, link=joined, network_bytes_per_s=network)


# One rank, one node


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_rank_has_no_bound(operation: str) -> None:
    for network in (None, NETWORK):
        found = bound(operation, ranks=1, nodes=1, link=SWITCH, network_bytes_per_s=network)
        assert found == Bound(bytes_per_s=None, detail="one rank moves nothing")


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("joined", [SWITCH, OLD_SWITCH, PCIE], ids=["switch", "old switch", "pcie"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_ranks_link_bounds_one_node(operation: str, joined: Link, ranks: int) -> None:
    found = inside(operation, ranks, joined)
    assert (found.bytes_per_s, found.detail) == (joined.bytes_per_s, joined.detail)


def test_only_all_reduce_may_pass_a_switch_that_reduces() -> None:
    for operation in OPERATIONS:
        found = inside(operation, 8)
        assert found.may_exceed == ("in-network reduction (NVLS)" if operation == "all_reduce" else None)
        # Each rank still sends and receives S: busbw is 2 x 7/8 x S/t.
        assert found.limit_bytes_per_s == pytest.approx(787.5e9 if operation == "all_reduce" else 450e9)


def test_what_was_measured_on_eight_h200_is_named_and_no_fault() -> None:
    found = inside("all_reduce", 8)
    assert found.bytes_per_s is not None
    assert found.limit_bytes_per_s is not None
    assert found.bytes_per_s < 480e9 < found.limit_bytes_per_s


@pytest.mark.parametrize(("ranks", "joined"), [(2, SWITCH), (8, OLD_SWITCH), (8, PCIE)])
def test_nothing_lifts_two_ranks_or_a_link_that_does_not_reduce(ranks: int, joined: Link) -> None:
    found = inside("all_reduce", ranks, joined)
    assert found.may_exceed is None
    assert found.limit_bytes_per_s == joined.bytes_per_s


@pytest.mark.parametrize("kind", ["nvlink_mesh", "xgmi_mesh"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_mesh_bounds_all_its_gpus_together_alone(operation: str, kind: LinkKind) -> None:
    mesh = link(kind, 448, peers=7)
    found = inside(operation, 8, mesh)
    if operation == "send_recv":
        assert found.bytes_per_s is None
        assert found.detail.startswith("a mesh, and each rank sends to one other")
    else:
        assert (found.bytes_per_s, found.may_exceed) == (448e9, None)
    for ranks in (2, 4, 7, 9):
        few = inside(operation, ranks, mesh)
        assert few.bytes_per_s is None
        assert few.detail.startswith(f"a mesh of 8 GPUs, and {ranks} ranks on a node")


def test_two_bridged_cards_are_a_whole_mesh() -> None:
    assert inside("send_recv", 2, link("nvlink_mesh", 300, peers=1)).bytes_per_s == 300e9


def test_a_link_that_is_not_known_bounds_nothing() -> None:
    found = inside("all_reduce", 8, None)
    assert found == Bound(bytes_per_s=None, detail="the link between the ranks is not known")


# Several nodes

# busbw per byte of network peak: the factor of nccl-tests over the share of S that crosses a node's boundary.
BY_HAND = {
    # 2 x 15/16 over 2 x 1/2; 2 x 31/32 over 2 x 3/4
    "all_reduce": (1.875, 31 / 24),
    # 15/16 over 1/2; 31/32 over 3/4
    "reduce_scatter": (1.875, 31 / 24),
    "all_gather": (1.875, 31 / 24),
    # 15/16 over 8 ranks x 8 peers / 16 = 4; 31/32 over 8 ranks x 24 peers / 32 = 6
    "all_to_all": (15 / 64, 31 / 192),
    "broadcast": (1, 1),
    "reduce": (1, 1),
    "send_recv": (1, 1),
}


def test_every_operation_is_worked_out() -> None:
    assert sorted(BY_HAND) == OPERATIONS


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_network_bounds_what_must_cross_it(operation: str) -> None:
    two, four = BY_HAND[operation]
    assert across(operation, 16, 2).bytes_per_s == pytest.approx(two * NETWORK)
    assert across(operation, 32, 4).bytes_per_s == pytest.approx(four * NETWORK)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_with_one_rank_a_node_the_network_is_the_link(operation: str) -> None:
    """As many nodes as ranks: what a rank sends is what its node sends, and its links carry nothing."""
    for joined in (None, SWITCH, PCIE):
        assert across(operation, 4, 4, joined).bytes_per_s == pytest.approx(NETWORK)


def simulated_ring_share(nodes: int, per_node: int) -> float:
    """The most that a node of a ring all_reduce sends to another, in multiples of S, counted message by message."""
    ranks = nodes * per_node
    sent = [0.0] * nodes
    for _ in range(2 * (ranks - 1)):  # steps; in each, every rank sends S / ranks to the next one
        for rank in range(ranks):
            node, other = rank // per_node, (rank + 1) % ranks // per_node
            sent[node] += (1 / ranks) if node != other else 0
    return max(sent)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 8), (4, 8), (2, 1), (3, 2)])
def test_no_ring_passes_the_bound(nodes: int, per_node: int) -> None:
    """A flat ring sends 2(n-1)/n S out of a node, which is more than must cross; its busbw is the network's peak."""
    ranks = nodes * per_node
    share = simulated_ring_share(nodes, per_node)
    assert share == pytest.approx(2 * (ranks - 1) / ranks)
    found = across("all_reduce", ranks, nodes).bytes_per_s
    assert found is not None
    assert found >= NETWORK * (2 * (ranks - 1) / ranks) / share * (1 - 1e-9)


def test_all_to_all_of_two_nodes_counted_pair_by_pair() -> None:
    ranks, per_node = 16, 8
    crossing = sum(
        1 / ranks for source in range(per_node) for target in range(ranks) if target // per_node != source // per_node
    )
    expected = NETWORK * (ranks - 1) / ranks / crossing
    assert across("all_to_all", ranks, 2).bytes_per_s == pytest.approx(expected)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_a_network_peak_several_nodes_have_no_bound(operation: str) -> None:
    found = across(operation, 16, 2, SWITCH, network=None)
    assert found == Bound(bytes_per_s=None, detail="2 nodes, and no network peak is stated")


def test_unequal_nodes_have_no_bound() -> None:
    expected = Bound(bytes_per_s=None, detail="the nodes have unequal numbers of ranks")
    assert across("all_reduce", 15, 2, SWITCH) == expected
    told = bound("all_reduce", ranks=16, nodes=2, link=SWITCH, network_bytes_per_s=NETWORK, even=False)
    assert told == expected
    assert bound("all_reduce", ranks=8, nodes=1, link=SWITCH, network_bytes_per_s=None, even=False).bytes_per_s == 450e9


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_smaller_of_boundary_and_ways_out_holds(operation: str) -> None:
    """8 ranks a node, each with a link of 450 GB/s and an eighth of the network's 400: 500 GB/s."""
    boundary = BY_HAND[operation][0] * NETWORK
    found = across(operation, 16, 2, SWITCH)
    assert found.bytes_per_s == pytest.approx(min(boundary, 500e9))
    expected = "a link; and 50.0 GB/s of network per rank" if boundary > 500e9 else "network of 400 GB/s per node"
    assert found.detail.startswith(expected)


def test_over_pcie_the_networks_traffic_is_the_links_too() -> None:
    assert across("all_reduce", 16, 2, PCIE).bytes_per_s == 31.504e9


def test_a_mesh_bounds_several_nodes_only_where_each_has_all_of_it() -> None:
    mesh = link("xgmi_mesh", 448, peers=7)
    assert across("all_reduce", 16, 2, mesh).bytes_per_s == pytest.approx(498e9)
    assert across("all_reduce", 8, 2, mesh).bytes_per_s == pytest.approx(700e9)  # 2 x 7/8 over 1: the boundary alone


def test_only_all_reduce_may_pass_several_nodes() -> None:
    for operation in OPERATIONS:
        found = across(operation, 32, 4)
        assert found.may_exceed == ("in-network reduction (SHARP)" if operation == "all_reduce" else None)
        # A node sends and receives S at least: busbw is 2 x 31/32 x S/t.
        limit = 1.9375 * NETWORK if operation == "all_reduce" else found.bytes_per_s
        assert found.limit_bytes_per_s == pytest.approx(limit)
    both = across("all_reduce", 32, 4, SWITCH)
    assert both.bytes_per_s == pytest.approx(500e9)
    assert both.may_exceed == "in-network reduction (NVLS or SHARP)"
    assert both.limit_bytes_per_s == pytest.approx(1.9375 * 400e9)


def test_two_nodes_exchange_as_much_with_reduction_as_without() -> None:
    found = across("all_reduce", 16, 2)
    assert found.may_exceed is None
    assert found.limit_bytes_per_s == found.bytes_per_s


def test_the_detail_names_what_was_stated() -> None:
    assert across("all_to_all", 16, 2).detail == (
        "network of 400 GB/s per node and direction, as stated: all_to_all over 16 ranks on 2 nodes moves 4 S across "
        "a node's boundary"
    )


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_limit_is_never_below_the_bound(operation: str, nodes: int, ranks: int) -> None:
    if nodes > ranks:
        return
    found = across(operation, ranks, nodes, SWITCH)
    assert found.bytes_per_s is not None
    assert found.limit_bytes_per_s is not None
    assert found.limit_bytes_per_s >= found.bytes_per_s
    assert (found.may_exceed is not None) == (found.limit_bytes_per_s > found.bytes_per_s)


# What cannot be


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks=0 must be 1 or more"),
        ({"nodes": 0}, "nodes=0 must be 1 to ranks=8"),
        ({"nodes": 9}, "nodes=9 must be 1 to ranks=8"),
        ({"network_bytes_per_s": 0.0}, "network_bytes_per_s=0 must be a positive number"),
        ({"network_bytes_per_s": float("nan")}, "network_bytes_per_s=nan must be a positive number"),
    ],
)
def test_counts_and_peaks_that_cannot_be_are_refused(arguments: dict[str, float], message: str) -> None:
    values = {"ranks": 8, "nodes": 2, "network_bytes_per_s": NETWORK} | arguments
    with pytest.raises(CaseError, match=message):
        bound("all_reduce", link=SWITCH, **values)  # type: ignore[arg-type]


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(CaseError, match="operation='gather' is not known"):
        inside("gather", 8)
