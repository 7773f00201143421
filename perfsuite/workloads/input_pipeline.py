"""Batches from a DataLoader of set speed, and what share of a step's time went into waiting for them."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from perfsuite.errors import CaseError
from perfsuite.units import ms_to_s
from perfsuite.workloads.exposure import queued_s
from perfsuite.workloads.tensors import SEED

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    import torch

PREFETCHED = 2
"""How many batches each worker is asked for in advance, as torch's default has it."""
ENDING_S = 10.0

Span = tuple[Any, Any]
"""Two marks."""


@dataclass(frozen=True, kw_only=True)
class InputPipeline:
    """A loader in front of a training step that needs ``batch_s`` seconds for a batch.

    With ``workers=0`` the step's own process loads when the step asks; otherwise that many processes load in advance.
    A CaseError names what cannot be.

    On a GPU a timed block begins and ends with the device idle. With ``workers=0`` the loader's time is then never
    hidden behind the device's, as in a loop that reads its loss after every step.
    """

    batch_s: float
    workers: int = 0

    def __post_init__(self) -> None:
        if not _is_number(self.batch_s, int | float):
            raise CaseError(f"InputPipeline: batch_s={self.batch_s!r} must be a finite number of seconds, at least 0")
        if not _is_number(self.workers, int):
            raise CaseError(f"InputPipeline: workers={self.workers!r} must be a whole number of at least 0")

    def open(self, *, batch: int, seq_len: int, vocab: int, device: str) -> Feed:
        """Start loading (batch, seq_len + 1) token ids below ``vocab`` for a torch device."""
        import torch
        from torch import multiprocessing

        kind = torch.device(device).type
        source = TokenBatches(batch=batch, length=seq_len + 1, vocab=vocab, batch_s=self.batch_s)
        loader: Any = torch.utils.data.DataLoader(
            source,  # type: ignore[arg-type] # torch's loader takes any object with __getitem__
            batch_size=None,
            sampler=EndlessOrder(),
            num_workers=self.workers,
            prefetch_factor=PREFETCHED if self.workers else None,
            # A fork of a process with threads can hang, and one that has used a GPU breaks.
            multiprocessing_context="spawn" if self.workers else None,
            pin_memory=kind == "cuda",
        )
        meter = WaitMeter(_host_marks() if kind == "cpu" else EventMarks(getattr(torch, kind)))
        others = multiprocessing.active_children()
        batches = iter(loader)
        workers = [each for each in multiprocessing.active_children() if each not in others]
        return Feed(batches, meter, device=device, workers=workers)


def _host_marks() -> HostMarks:
    """As the harness times a CPU's steps: where several threads work, one's queueing says little about the step."""
    import torch

    return HostMarks(queued_s=queued_s) if torch.get_num_threads() == 1 else HostMarks()


def _is_number(value: object, kind: Any) -> bool:
    """Whether ``value`` is a finite number of a kind, and not negative."""
    return isinstance(value, kind) and not isinstance(value, bool) and 0 <= value < math.inf


@dataclass(frozen=True, kw_only=True)
class TokenBatches:
    """A data set of random token ids, each batch from a seed of its own, that takes ``batch_s`` seconds for any.

    It sleeps for what making the batch has left of them. Workers get a copy, so everything in it can be pickled.
    """

    batch: int
    length: int
    vocab: int
    batch_s: float
    now_s: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], object] = time.sleep

    def __getitem__(self, number: int) -> torch.Tensor:
        """(batch, length) token ids."""
        import torch

        end_s = self.now_s() + self.batch_s
        source = torch.Generator().manual_seed(SEED + number)
        tokens = torch.randint(self.vocab, (self.batch, self.length), generator=source)
        self.sleep(max(0.0, end_s - self.now_s()))
        return tokens


class EndlessOrder:
    """The numbers of batches, without end."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class Marks(Protocol):
    """Points in the time of whatever waits, and how far apart two of them are."""

    def mark(self) -> Any:
        """This moment."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to a later one."""

    def finish(self) -> None:
        """Wait until every mark has been passed."""


class HostMarks:
    """Moments of the host, for steps that it computes itself; time in which it waited for a core is left out."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.perf_counter,
        queued_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """``queued_s`` is how long the thread has waited for a core so far; None where that is not known."""
        self._now_s, self._queued_s = now_s, queued_s

    def mark(self) -> float:
        """Seconds on the host's clock, less those in the queue for a core."""
        return self._now_s() - (self._queued_s() or 0.0)

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start

    def finish(self) -> None:
        """The host is never behind itself."""


class EventMarks:
    """Moments of a device: between the event at which it ran out of work and the batch's arrival it is idle."""

    def __init__(self, module: Any) -> None:
        """``module`` is the backend's torch module: ``torch.cuda`` (ROCm too) or ``torch.xpu``."""
        self._module = module

    def mark(self) -> Any:
        """An event, behind all the work that the device has been given."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """On the device's clock."""
        return ms_to_s(start.elapsed_time(end))

    def finish(self) -> None:
        """Wait for the device."""
        self._module.synchronize()


class WaitMeter:
    """What share of a step's time was spent waiting: the median of the steps since the last reset, as its time is.

    So a step that the machine held up, or that was not timed, does not move it.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._steps: list[tuple[Span, list[Span]]] = []
        self._waits: list[Span] = []
        """Of the step that is running; between steps, of none."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step, from its first wait to its end."""
        self._waits = []
        start = self._marks.mark()
        yield
        self._steps.append(((start, self._marks.mark()), self._waits))
        self._waits = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within a step: until a batch has arrived."""
        start = self._marks.mark()
        yield
        self._waits.append((start, self._marks.mark()))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is waited for or done in here does not count."""
        steps = len(self._steps)
        yield
        del self._steps[steps:]

    def reset(self) -> None:
        """Begin again."""
        self._steps.clear()

    def share(self) -> float | None:
        """Between 0 and 1; None before the first step."""
        self._marks.finish()
        shares = [
            sum(map(self._seconds, waits)) / step_s
            for step, waits in self._steps
            if (step_s := self._seconds(step)) > 0
        ]
        return statistics.median(shares) if shares else None

    def _seconds(self, span: Span) -> float:
        return self._marks.seconds(*span)


class Feed:
    """A loader's batches as a step asks for them."""

    def __init__(
        self,
        batches: Iterator[torch.Tensor],
        meter: WaitMeter,
        *,
        device: str,
        workers: Sequence[BaseProcess] = (),
    ) -> None:
        """``workers`` are the loader's processes."""
        self.meter = meter
        self._batches: Iterator[torch.Tensor] | None = batches
        self._device = device
        self._workers = workers

    def fetch(self) -> torch.Tensor:
        """The next batch on the device; the time until the loader had it counts as waiting."""
        assert self._batches is not None
        with self.meter.waiting():
            tokens = next(self._batches)
        return tokens.to(self._device, non_blocking=True)

    def settle(self, step: Callable[[], object]) -> None:
        """Take what the loader has got ready while nobody asked, and run one ``step``; nothing of it counts.

        The next step then finds the loader where it is when steps follow one another.
        """
        with self.meter.uncounted():
            for _ in range(PREFETCHED * len(self._workers)):
                self.fetch()
            step()

    def shares(self) -> dict[str, float]:
        """``input_wait``: the share of a step's time that is spent waiting for input."""
        share = self.meter.share()
        return {} if share is None else {"input_wait": share}

    def close(self) -> None:
        """End the loader's processes."""
        self._batches = None  # torch ends them when the iterator goes
        for worker in self._workers:
            worker.join(ENDING_S)
            if worker.is_alive():
                worker.kill()
                worker.join()
