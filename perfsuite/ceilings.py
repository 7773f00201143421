"""The denominators of a session: the data sheet's, or the best rates measured so far."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from perfsuite.hardware.device import Device
from perfsuite.hardware.links import LinkView
from perfsuite.measure import ceiling as measured
from perfsuite.measure.measurement import CeilingSample, Measurement
from perfsuite.record import CeilingPart
from perfsuite.topology import Bound, bound
from perfsuite.utilization import Ceiling, Part, compute_ceiling, ideal_time_s, memory_ceiling

IMPLAUSIBLE_MEASURED = 3.0
"""A measured ceiling is itself a measurement; three times it is no longer noise or a better kernel."""


@dataclass(kw_only=True)
class Ceilings:
    """The denominators of one session: the data sheet's, or the best rates measured so far."""

    device: Device
    link: LinkView = field(default_factory=LinkView)
    """What joins the device to the others of its node."""
    network_bytes_per_s: float | None = None
    """What a node's network carries in one direction, as the user states it."""
    _best: dict[str, CeilingSample] = field(default_factory=dict)

    def note(self, measurement: Measurement) -> None:
        """Keep what an attempt offers as ceilings where it is the best of its key."""
        for sample in measurement.ceilings:
            best = self._best.get(sample.key)
            if math.isfinite(sample.rate_per_s) and (best is None or sample.rate_per_s > best.rate_per_s):
                self._best[sample.key] = sample

    def of(self, measurement: Measurement) -> CeilingPart | None:
        """What this measurement's rate is held against, that of all its ranks; None where nothing is known."""
        if measurement.moved is not None:
            return self._link(measurement)
        found, ranks = self._of_one(measurement), measurement.ranks
        if found is None or ranks == 1:
            return found
        return msgspec.structs.replace(found, value=ranks * found.value, detail=f"{ranks} x {found.detail}")

    def _link(self, measurement: Measurement) -> CeilingPart | None:
        """What bounds a collective's bus bandwidth; None where nothing does, and it is judged alone."""
        bound = self._bound(measurement)
        if bound is None or bound.bytes_per_s is None:
            return None
        detail = bound.detail if bound.may_exceed is None else f"{bound.detail}; {bound.may_exceed} may lift it"
        source = "stated" if "network" in bound.detail else "datasheet"
        return CeilingPart(kind="link", value=bound.bytes_per_s, unit="B/s", source=source, detail=detail)

    def _bound(self, measurement: Measurement) -> Bound | None:
        """The most that the bus bandwidth can be; None for work that is no collective judged by it."""
        if measurement.moved is None or measurement.metric != "busbw_utilization":
            return None
        ranks_of = Counter(each.node for each in measurement.group.ranks) if measurement.group else Counter({0: 1})
        return bound(
            measurement.moved.operation,
            ranks=measurement.ranks,
            nodes=len(ranks_of),
            link=self.link.link,
            network_bytes_per_s=self.network_bytes_per_s,
            even=len(set(ranks_of.values())) == 1,
        )

    def lifted_by(self, measurement: Measurement) -> str | None:
        """What lifts a collective's bus bandwidth above its link's; None where it lies below."""
        bound = self._bound(measurement)
        if bound is None or not bound.bytes_per_s or not measurement.time.median_s > 0:
            return None
        above = measurement.wire_bytes / measurement.time.median_s > bound.bytes_per_s
        return bound.may_exceed if above else None

    def _of_one(self, measurement: Measurement) -> CeilingPart | None:
        """What one rank's rate is held against."""
        if self.device.hardware() is not None:
            return self._datasheet(measurement)
        if measurement.metric == "mfu":
            return self._measured_compute(measurement)
        best = self._best.get(_key(measurement))
        if best is None:
            return None
        return _measured_part(best, "memory" if measurement.metric == "mbu" else "calls")

    def _measured_compute(self, measurement: Measurement) -> CeilingPart | None:
        """The best rate of the data type; for several the rate at which each part would run at its own."""
        split = {dtype: flops for dtype, flops in measurement.flops_by_dtype.items() if flops}
        found = {dtype: self._best.get(measured.compute_key(dtype)) for dtype in split or {measurement.dtype: 0}}
        best = {dtype: sample for dtype, sample in found.items() if sample is not None}
        if len(best) < len(found):
            return None
        first = _measured_part(next(iter(best.values())), "compute")
        if len(best) == 1:
            return first
        ideal_s = ideal_time_s(
            Part(flops=flops, peak_flops_per_s=best[dtype].rate_per_s) for dtype, flops in split.items()
        )
        detail = "best of " + " + ".join(sample.detail for sample in best.values())
        return msgspec.structs.replace(first, value=measurement.flops / ideal_s, detail=detail)

    def _datasheet(self, measurement: Measurement) -> CeilingPart | None:
        """The dense peak; for several data types the rate at which each part would run at its own peak."""
        hardware = self.device.hardware()
        assert hardware is not None
        if measurement.metric == "mbu":
            return _part(memory_ceiling(hardware), "memory")
        if measurement.metric != "mfu":
            return None
        peaks = {dtype: compute_ceiling(hardware, dtype) for dtype in measurement.flops_by_dtype}
        known = {dtype: peak for dtype, peak in peaks.items() if peak is not None}
        if len(known) < len(peaks) or not measurement.flops:
            return None
        if len(known) == 1:
            return _part(known[measurement.dtype if measurement.dtype in known else next(iter(known))], "compute")
        ideal_s = ideal_time_s(
            Part(flops=flops, peak_flops_per_s=known[dtype].value)
            for dtype, flops in measurement.flops_by_dtype.items()
        )
        first = _part(known[next(iter(known))], "compute")
        detail = " + ".join(peak.detail for peak in known.values())
        return msgspec.structs.replace(first, value=measurement.flops / ideal_s, detail=detail)

    def limit(self, measurement: Measurement) -> float:
        """The rate above which a measurement is a fault; infinite where nothing is known."""
        ceiling = self.of(measurement)
        if ceiling is None:
            return math.inf
        if (bound := self._bound(measurement)) is not None:
            return bound.limit_bytes_per_s or math.inf
        if ceiling.source == "measured":
            return ceiling.value * IMPLAUSIBLE_MEASURED
        if ceiling.kind != "compute":
            return ceiling.value
        hardware = self.device.hardware()
        return ceiling.value * (hardware.clock_scale(self.device.max_clock_mhz) if hardware else 1.0)


def _part(ceiling: Ceiling, kind: str) -> CeilingPart:
    """A data sheet's ceiling as the record keeps it."""
    return CeilingPart(kind=kind, value=ceiling.value, unit=ceiling.unit, source=ceiling.source, detail=ceiling.detail)


def _measured_part(best: CeilingSample, kind: str) -> CeilingPart:
    """A measured ceiling as the record keeps it."""
    return CeilingPart(
        kind=kind, value=best.rate_per_s, unit=best.unit, source="measured", detail=f"best of {best.detail}"
    )


def _key(measurement: Measurement) -> str:
    """Under which key the measured ceiling of bytes or calls is kept."""
    if measurement.metric == "mbu":
        return measured.memory_key(measurement.nbytes or 0) if measurement.control else "memory"
    return measured.CALLS_KEY
