"""Collective operations of torch.distributed, sized and counted as nccl-tests does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from perfsuite.dtypes import dtype_of
from perfsuite.errors import CaseError
from perfsuite.flops import Parts
from perfsuite.units import format_bytes
from perfsuite.utilization import busbw_factor
from perfsuite.workloads.base import (
    Communication,
    Description,
    Prepared,
    Step,
    Target,
    Work,
    Workload,
    one_of,
    plain_float,
    positive_int,
    true_or_false,
)
from perfsuite.workloads.collective_check import ROOT, Expectation, fill_input
from perfsuite.workloads.groups import BACKENDS, data_group
from perfsuite.workloads.tensors import poisoned, torch_dtype

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# Where torch lets an operation write: over its input, elsewhere, or as the caller likes.
PLACES = {
    "all_reduce": (True,),
    "reduce_scatter": (False, True),
    "all_gather": (False, True),
    "all_to_all": (False,),
    "broadcast": (True,),
    "reduce": (True,),
    "send_recv": (False,),
}
SHARDED = ("reduce_scatter", "all_gather", "all_to_all")
LATENCY_BELOW_BYTES = 1024**2
"""Smaller ones are judged by their time: links are not filled by them."""
CPU_LARGEST_BYTES = 64 * 1024**2
"""A fixed bound, so that whether a large one runs on a CPU does not depend on the day's rate of its loopback."""
CPU_LARGEST_ALONE_BYTES = 1024**2
"""What one rank does with more is to copy it."""


@dataclass(frozen=True, kw_only=True)
class Collective(Workload):
    """One operation of ``ranks`` ranks on ``nbytes`` as nccl-tests counts them.

    That is one rank's buffer; of ``reduce_scatter`` a rank's input, of ``all_gather`` its output, of ``all_to_all``
    either, each a share for every rank: what is left over of equal shares is not moved, and a share has one element at
    least. ``send_recv`` sends to the next rank and receives from the one before. ``broadcast`` and ``reduce`` have rank
    0 as their root.

    ``in_place`` left out is False where torch has that form; all_reduce, reduce and broadcast are always in place, and
    all_to_all and send_recv never. ``backend`` (``gloo``, ``nccl``, ``xccl``) left out is the device's own.
    """

    kind = "collective"
    rotates = False

    operation: str
    nbytes: int
    ranks: int
    in_place: bool | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("Collective", "operation", self.operation, PLACES)
        plain_float("Collective", self.dtype)
        positive_int("Collective", "ranks", self.ranks)
        if positive_int("Collective", "nbytes", self.nbytes) % dtype_of(self.dtype).itemsize:
            raise CaseError(f"Collective: nbytes={self.nbytes} must be whole elements of {self.dtype}")
        if self.in_place is not None:
            true_or_false("Collective", "in_place", self.in_place)
            if self.in_place not in PLACES[self.operation]:
                raise CaseError(
                    f"Collective: in_place={self.in_place} is no form of {self.operation} in torch; leave it out"
                )
        if self.backend is not None:
            one_of("Collective", "backend", self.backend, BACKENDS)

    @property
    def moved_bytes(self) -> int:
        """``nbytes`` in equal shares where the operation has shares."""
        itemsize = dtype_of(self.dtype).itemsize
        if self.operation not in SHARDED:
            return self.nbytes
        return max(self.nbytes // (itemsize * self.ranks), 1) * itemsize * self.ranks

    def work(self) -> Work:
        """Bytes on the wire alone: what the memory does beside them is the library's own affair."""
        factor = busbw_factor(self.operation, self.ranks)
        return Work(flops=0, nbytes=None, wire_bytes=round(self.moved_bytes * factor))

    def parts(self) -> Parts:
        """None: the additions of a reduction are not counted."""
        return ()

    def memory_bytes(self) -> int | None:
        """One rank's input and output; in place, the buffer and a copy of the input to fill it with again."""
        elements = self._elements()
        held = max(elements) if self.communication().in_place else elements[1]
        return (elements[0] + held) * dtype_of(self.dtype).itemsize

    def judged_by(self) -> str | None:
        """Bus bandwidth from 1 MiB on; one rank's says nothing."""
        small = self.nbytes < LATENCY_BELOW_BYTES or self.ranks == 1
        return "latency_us" if small else "busbw_utilization"

    def communication(self) -> Communication:
        """The operation with what it really moves."""
        in_place = PLACES[self.operation][0] if self.in_place is None else self.in_place
        return Communication(operation=self.operation, nbytes=self.moved_bytes, in_place=in_place)

    def group_size(self) -> int:
        """All ranks make it together."""
        return self.ranks

    def cpu_control(self) -> str | None:
        """What Gloo is made of."""
        return "loopback"

    def unsupported(self, target: Target) -> str | None:
        """The libraries of GPUs take no tensors of a CPU, Gloo sends none of a GPU, and a CPU moves no gigabytes."""
        if self.backend in ("nccl", "xccl") and target.backend == "cpu":
            return f"{self.backend} needs GPUs"
        if target.backend == "cpu" and self.moved_bytes > CPU_LARGEST_BYTES:
            largest = format_bytes(CPU_LARGEST_BYTES)
            return f"{format_bytes(self.moved_bytes)} are for GPUs, collectives on a CPU have at most {largest}"
        if target.backend == "cpu" and self.ranks == 1 and self.moved_bytes > CPU_LARGEST_ALONE_BYTES:
            return f"one rank moves nothing, {format_bytes(self.moved_bytes)} are for several: --perf-ranks 2"
        if self.backend == "gloo" and target.backend != "cpu" and self.operation == "send_recv":
            return "gloo sends no tensors of a GPU"
        return None

    def describe(self) -> Description:
        """With what is really moved, and where to."""
        moved = self.communication()
        return {**super().describe(), "moved_bytes": moved.nbytes, "in_place": moved.in_place}

    def build(self, device: str) -> Step | Prepared:
        """One operation in the order of the device's stream, as torch calls it without ``async_op``."""
        if device == "meta":
            return lambda: None
        from torch import distributed

        group = data_group(self.backend, device)
        if group.size() != self.ranks:
            raise CaseError(
                f"Collective: ranks={self.ranks} must be the {group.size()} of the group; "
                "take their number from the fixture 'ranks'"
            )
        rank = distributed.get_rank(group)
        buffers = self._buffers(device, rank)
        expectation = Expectation(operation=self.operation, example=buffers.sent, ranks=self.ranks)
        tells = self.operation != "reduce" or rank == ROOT
        return Prepared(
            step=_telling(_call(self.operation, buffers, group), buffers.received if tells else None),
            reference=partial(expectation.result, rank),
            before_block=buffers.restore,
            resident_bytes=buffers.resident_bytes,
        )

    def _elements(self) -> tuple[int, int]:
        """Of one rank's input and output."""
        whole = self.moved_bytes // dtype_of(self.dtype).itemsize
        share = whole // self.ranks
        return {"reduce_scatter": (whole, share), "all_gather": (share, whole)}.get(self.operation, (whole, whole))

    def _buffers(self, device: str, rank: int) -> _Buffers:
        """One rank's, filled; in place the smaller of the two is the rank's share of the larger one."""
        sizes, stored, in_place = self._elements(), torch_dtype(self.dtype), self.communication().in_place
        if in_place:
            whole = poisoned((max(sizes),), stored, device)
            share = whole.view(-1, min(sizes))[rank if min(sizes) < max(sizes) else 0]
            sent, received = (whole if each == max(sizes) else share for each in sizes)
        else:
            sent, received = (poisoned((each,), stored, device) for each in sizes)
        puts_in = self.operation != "broadcast" or rank == ROOT
        if puts_in:
            fill_input(sent, rank=rank, ranks=self.ranks)
        return _Buffers(sent=sent, received=received, kept=sent.clone() if in_place and puts_in else None)


@dataclass(frozen=True, kw_only=True)
class _Buffers:
    """What one rank puts in and what it gets; ``kept`` is the input where the operation writes over it."""

    sent: torch.Tensor
    received: torch.Tensor
    kept: torch.Tensor | None

    def restore(self) -> None:
        """Spoil the result, so that it is not the one before, and put the input back in its place."""
        self.received.fill_(float("nan"))
        if self.kept is not None:
            self.sent.copy_(self.kept)

    def resident_bytes(self) -> int:
        """What they hold; in place, input and output are of one storage."""
        storages = [each.untyped_storage() for each in (self.sent, self.received, self.kept) if each is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _telling(call: Step, result: torch.Tensor | None) -> Step:
    """The step, with the tensor that its result is in."""

    def step() -> torch.Tensor | None:
        call()
        return result

    return step


def _call(operation: str, buffers: _Buffers, group: ProcessGroup) -> Step:
    """The operation as one call."""
    from torch import distributed

    # torch 2.13 has new names for two of them, and warns at every call by the old ones.
    named: Any = distributed
    scatter = getattr(named, "reduce_scatter_single", None) or named.reduce_scatter_tensor
    gather = getattr(named, "all_gather_single", None) or named.all_gather_into_tensor
    sent, received = buffers.sent, buffers.received
    calls: dict[str, Step] = {
        "all_reduce": partial(named.all_reduce, received, group=group),
        "reduce": partial(named.reduce, received, dst=ROOT, group=group),
        "broadcast": partial(named.broadcast, received, src=ROOT, group=group),
        "reduce_scatter": partial(scatter, received, sent, group=group),
        "all_gather": partial(gather, received, sent, group=group),
        "all_to_all": partial(named.all_to_all_single, received, sent, group=group),
    }
    return calls[operation] if operation in calls else _send_recv(buffers, group)


def _send_recv(buffers: _Buffers, group: ProcessGroup) -> Step:
    """To the next rank and from the one before, at the same time; one rank copies, since none sends to itself."""
    from torch import distributed

    rank, ranks = distributed.get_rank(group), group.size()
    if ranks == 1:
        return partial(buffers.received.copy_, buffers.sent)
    exchange = [
        distributed.P2POp(distributed.isend, buffers.sent, (rank + 1) % ranks, group),
        distributed.P2POp(distributed.irecv, buffers.received, (rank - 1) % ranks, group),
    ]

    def step() -> None:
        for each in distributed.batch_isend_irecv(exchange):
            each.wait()

    return step
