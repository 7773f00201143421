"""What ranks leave in evidence and records: bandwidths, ceilings of links and of many devices, the fingerprint."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from perfsuite.baseline import differences, make_row
from perfsuite.ceilings import Ceilings
from perfsuite.evidence import TimedMeasurement, build_record, declared_work, gather_evidence, rates
from perfsuite.hardware.catalogue import load
from perfsuite.hardware.device import Device
from perfsuite.hardware.links import Link, LinkView, nvlink
from perfsuite.measure.measurement import CeilingSample, GroupSummary, Measurement, Moved, Overhead, RankSummary
from perfsuite.measure.measurement import TimeSummary as Time
from perfsuite.record import Record, decode, encode, rate
from perfsuite.verdict import Outcome, Verdict

ROW = load().by_sku("h100-sxm5-80gb")
H100 = Device(backend="cuda", index=0, name="H100", uuid_hash="0", sku="h100-sxm5-80gb", family="h100", known=True)
CPU = Device(backend="cpu", index=0, name="Some CPU", uuid_hash=None, sku="cpu-some", family="cpu", known=False)
LINK = nvlink(active=18, version=6, peers=None, capability=(9, 0), row=ROW)
"""450 GB/s in one direction, through a switch that can reduce."""


def group(ranks: int, *, nodes: int = 1, **changes: Any) -> GroupSummary:
    """Ranks in rows on their nodes; the last one is 30 us late and last in 3 of 4 blocks."""
    last = ranks - 1
    return GroupSummary(
        reduction="max",
        skew_s=30e-6,
        ranks=tuple(
            RankSummary(
                rank=rank,
                node=rank * nodes // ranks,
                late_s=30e-6 if rank == last else 0.0,
                last_share=0.75 if rank == last else 0.25 / max(last, 1),
            )
            for rank in range(ranks)
        ),
        **changes,
    )


def collective(
    operation: str = "all_reduce", *, ranks: int = 8, nodes: int = 1, time_s: float = 1e-3, **changes: Any
) -> Measurement:
    """64 MiB, 7/4 of which count on the bus where 8 ranks reduce them."""
    factor = 2 * (ranks - 1) / ranks if operation == "all_reduce" else (ranks - 1) / ranks
    plain: dict[str, Any] = {
        "workload": {"kind": "collective"},
        "dtype": "fp32",
        "metric": "busbw_utilization",
        "launch": "eager",
        "precision": {},
        "flops": 0,
        "flops_by_dtype": {},
        "flop_convention": "exact",
        "nbytes": None,
        "wire_bytes": round(2**26 * factor),
        "time": Time(median_s=time_s, low_s=time_s, high_s=time_s, samples=20),
        "y": 0.0,
        "y_low": 0.0,
        "y_high": 0.0,
        "durations_s": (time_s,) * 20,
        "moved": Moved(operation=operation, nbytes=2**26, in_place=False),
        "group": group(ranks, nodes=nodes) if ranks > 1 else None,
        "overhead": Overhead(wall_s=1, build_s=0, warmup_s=0, timed_s=0, control_s=0, sampling_wall_s=0),
    }
    return Measurement(**{**plain, **changes})


def record(latest: Measurement, ceilings: Ceilings) -> Record:
    return build_record(
        run="r",
        case="cases/collectives.py::bench_all_reduce",
        verdict=Verdict(outcome=Outcome.NEW, reason="no baseline row"),
        failure=None,
        latest=latest,
        attempts=[TimedMeasurement(measurement=latest, start_s=0.0, fresh=False)],
        device=ceilings.device,
        ceilings=ceilings,
        row=None,
        row_environment={},
        tolerance=0.03,
        drill_percent=0.0,
        environment={},
    )


def implausible(measurement: Measurement, ceilings: Ceilings) -> str | None:
    timed = TimedMeasurement(measurement=measurement, start_s=0.0, fresh=False)
    return gather_evidence([timed], None, (), ceilings, all_fresh=False).implausible


def test_bandwidths_by_hand() -> None:
    """64 MiB in 1 ms are 67.1 GB/s, 117.4 GB/s on the bus of 8 ranks: 26.1 % of 450."""
    found = record(collective(), Ceilings(device=H100, link=LINK))
    assert found.collective is not None
    assert found.collective.algbw == pytest.approx(67_108_864_000)
    assert found.collective.busbw == pytest.approx(117_440_512_000)
    judged = rate(found)
    assert judged is not None
    assert judged[0] == pytest.approx(117_440_512_000)
    assert found.value == pytest.approx(117.440512 / 450)
    assert (found.metric, found.bound) == ("busbw_utilization", "link")
    assert found.device is not None
    assert found.device.ranks == 8
    assert found.group is not None
    assert found.group.skew_us == pytest.approx(30.0)
    assert found.group.ranks[7].last_share == 0.75
    assert decode(encode(found), "here") == found


def test_one_rank_has_no_utilization() -> None:
    one = collective(ranks=1, metric="latency_us", wire_bytes=0)
    found = record(one, Ceilings(device=H100, link=LINK))
    assert (found.ceiling, found.group) == (None, None)
    assert found.value == pytest.approx(1000.0)  # microseconds
    assert found.collective is not None
    assert found.collective.busbw == 0.0


def test_on_a_cpu_and_on_unknown_links_the_bus_bandwidth_stands_alone() -> None:
    for ceilings in (Ceilings(device=CPU), Ceilings(device=H100, link=LinkView(reason="NVML is not there"))):
        found = record(collective(), ceilings)
        assert (found.value, found.ceiling) == (None, None)
        assert found.collective is not None
        assert found.collective.busbw
        assert implausible(collective(time_s=1e-9), ceilings) is None


def test_many_nodes_are_held_against_a_network_that_is_stated_alone() -> None:
    many = collective(ranks=16, nodes=2)
    assert record(many, Ceilings(device=H100, link=LINK)).ceiling is None
    stated = record(many, Ceilings(device=H100, link=LINK, network_bytes_per_s=400e9))
    assert stated.ceiling is not None
    assert stated.ceiling.source == "stated"
    assert stated.ceiling.value == pytest.approx(500e9)  # a rank's link and its 50 GB/s of the network


def test_more_than_the_link_is_a_fault_but_for_what_a_switch_can_reduce() -> None:
    """117.4 GB in 0.25 ms: 470 GB/s on a link of 450, as 8 H200 have shown for all_reduce."""
    ceilings = Ceilings(device=H100, link=LINK)
    lifted = collective(time_s=0.25e-3)
    assert implausible(lifted, ceilings) is None
    assert "in-network reduction" in record(lifted, ceilings).reason
    assert "in-network" not in record(collective(), ceilings).reason
    assert implausible(collective(time_s=0.05e-3), ceilings) is not None
    other = collective("all_gather", time_s=0.12e-3)  # 489 GB/s
    assert "is 109% of the datasheet ceiling" in (implausible(other, ceilings) or "")


def test_ceilings_of_compute_are_those_of_all_ranks() -> None:
    """8 H100 have 8 x 989.5 TFLOP/s in bf16."""
    step = collective(
        metric="mfu", moved=None, dtype="bf16", flops=10**15, flops_by_dtype={"bf16": 10**15}, time_s=0.25, wire_bytes=0
    )
    found = record(step, Ceilings(device=H100))
    assert found.ceiling is not None
    assert found.ceiling.value == pytest.approx(8 * 989.5e12)
    assert found.ceiling.detail.startswith("8 x h100-sxm5-80gb bf16")
    assert found.value == pytest.approx(1e15 / 0.25 / (8 * 989.5e12))


def test_measured_ceilings_too() -> None:
    ceilings = Ceilings(device=CPU)
    sample = CeilingSample(key="compute.fp32", rate_per_s=5e10, unit="FLOP/s", detail="numpy")
    step = collective(
        ranks=2, metric="mfu", moved=None, flops=10**9, flops_by_dtype={"fp32": 10**9}, ceilings=(sample,)
    )
    ceilings.note(step)
    found = ceilings.of(step)
    assert found is not None
    assert found.value == 1e11


def test_the_judged_rate_is_that_of_the_wire() -> None:
    each = collective()
    assert rates(each)[0] == pytest.approx(each.wire_bytes / 1e-3)


def test_another_number_of_ranks_is_other_work() -> None:
    stored, here = declared_work(collective(ranks=8)), declared_work(collective(ranks=4))
    row = make_row(
        ys=(0.0, 0.0, 0.0), declared=stored, environment="e", device=None, peak_memory_bytes=None, prior_spread=0.03
    )
    assert "ranks 8 -> 4" in differences(row, here)
    assert differences(row, stored) == ()


def test_skew_of_an_unmeasured_group_is_finite() -> None:
    broken = replace(collective(), time=Time(median_s=math.nan, low_s=math.nan, high_s=math.nan, samples=0))
    found = record(broken, Ceilings(device=CPU))
    assert found.collective is not None
    assert found.collective.algbw is None
    assert decode(encode(found), "here").collective == found.collective


def test_a_bound_of_the_nodes_links_alone_is_not_called_stated() -> None:
    """Two nodes over PCIe: a rank's own lanes bound it, whatever the network is."""
    narrow = LinkView(link=Link(kind="pcie", bytes_per_s=16e9, detail="PCIe 3.0 x16"))
    ceilings = Ceilings(device=H100, link=narrow, network_bytes_per_s=400e9)
    found = ceilings.of(collective(ranks=16, nodes=2))
    assert found is not None
    assert (found.value, found.source) == (16e9, "datasheet")
