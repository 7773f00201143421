"""What the terminal adds for ranks: bandwidths, skew, scaling, and who was waited for."""

from __future__ import annotations

from typing import Any

import pytest
from rich.cells import cell_len

from perfsuite.record import CollectivePart, DevicePart, GroupPart, RankPart, Record, TimePart
from perfsuite.terminal import summary

CASE = "cases/collectives.py::bench_all_reduce[16MiB]"


def group(*last: float, late_us: float = 30.0, nodes: tuple[int, ...] = (), **changes: Any) -> GroupPart:
    """Ranks that were last in these shares of the blocks; those that were last are late."""
    return GroupPart(
        reduction="max",
        skew_us=late_us,
        ranks=tuple(
            RankPart(rank=rank, node=nodes[rank] if nodes else 0, late_us=share * late_us, last_share=share)
            for rank, share in enumerate(last)
        ),
        **changes,
    )


def record(case: str = CASE, **changes: Any) -> Record:
    """16 MiB in 200 us on 8 ranks: 83.9 GB/s, and 7/4 of it on the bus."""
    plain: dict[str, Any] = {
        "run": "r",
        "case": case,
        "verdict": "NEW",
        "reason": "because",
        "metric": "busbw_utilization",
        "bound": "link",
        "wire_bytes": 29_360_128,
        "time_us": TimePart(median=200.0, low=199.0, high=201.0, samples=40),
        "device": DevicePart(sku="h100-sxm5-80gb", name="H100", uuid_hash="0", ranks=8),
        "collective": CollectivePart(
            operation="all_reduce", nbytes=2**24, in_place=False, algbw=83.886e9, busbw=146.8e9
        ),
    }
    return Record(**{**plain, **changes})


def show(*records: Record, width: int = 100) -> str:
    return summary(records, width=width, color=False)


def part(text: str) -> str:
    """The table of ranks alone."""
    _, found, rest = text.partition("ranks and collectives\n")
    return rest.partition("\n\n")[0] if found else ""


def test_bandwidths_skew_and_who_was_last() -> None:
    found = part(show(record(group=group(0.1, 0.9))))
    assert all(word in found for word in ("83.9 GB/s", "147 GB/s", "200 us", "30.0 us", "1 in 90 %")), found


def test_the_rate_that_is_judged_is_the_bus_bandwidth() -> None:
    """29,360,128 bytes in 200 us are 146.8 GB/s."""
    assert "147 GB/s" in show(record()).partition("ranks and collectives")[0]


def test_one_rank_has_no_bus_bandwidth() -> None:
    one = CollectivePart(operation="all_reduce", nbytes=8, in_place=False, algbw=1e9, busbw=0.0)
    device = DevicePart(sku="cpu", name="CPU", uuid_hash="0")
    found = part(show(record(collective=one, device=device, metric="latency_us", value=200.0, wire_bytes=0)))
    assert "200 us" in found
    assert "bw" not in found


def test_scaling_efficiency_is_shown() -> None:
    found = part(show(record(collective=None, metric="mfu", group=group(0.5, 0.5, scaling_efficiency=0.873))))
    assert "87.3 %" in found


def test_without_ranks_there_is_no_table() -> None:
    assert part(show(record(collective=None))) == ""


def test_the_slowest_node_and_rank_are_named() -> None:
    """Rank 3, on the second of two nodes, is waited for in 4 of 5 blocks, for 30 of 200 us."""
    found = show(record(group=group(0.0, 0.1, 0.1, 0.8, nodes=(0, 0, 1, 1))))
    node, rank = (found.index(word) for word in ("slowest: node 1 was last in 90 %", "slowest: rank 3 (node 1)"))
    assert node < rank
    assert "by 12.0 % of the step" in " ".join(found.split())


@pytest.mark.parametrize("parts", [group(0.5, 0.5), group(0.05, 0.95, late_us=1.0)])
def test_chance_and_trifles_are_not_told_of(parts: GroupPart) -> None:
    assert "slowest" not in show(record(group=parts))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 140, 200])
def test_no_line_is_too_long(width: int) -> None:
    text = show(record(group=group(0.0, 1.0, nodes=(0, 1))), record("cases/x.py::bench_other", group=None), width=width)
    assert max(map(cell_len, text.splitlines())) <= width


def test_nobody_is_told_to_run_ranks_in_one_process() -> None:
    found = show(record(verdict="ERROR", reason="rank 1: ValueError: boo", time_us=None, collective=None))
    assert "rank 1: ValueError: boo" in found
    assert "--perf-in-process" not in found
