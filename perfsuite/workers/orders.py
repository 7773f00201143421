"""What the coordinator orders a supervisor, one of the processes of a user's torchrun, and what that answers."""

from __future__ import annotations

import msgspec

from perfsuite.workers.protocol import WorkerConfig


class StartRank(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Start the rank; it connects to the coordinator by itself."""

    worker: WorkerConfig


class Mark(msgspec.Struct, frozen=True, kw_only=True, tag="mark"):
    """From here on counts what the rank prints."""


class ShowStacks(msgspec.Struct, frozen=True, kw_only=True, tag="stacks"):
    """Have the rank write its Python stacks; answered with what it has printed."""


class ShowPrinted(msgspec.Struct, frozen=True, kw_only=True, tag="printed"):
    """Answered with what the rank has printed since the mark."""


class TellEnd(msgspec.Struct, frozen=True, kw_only=True, tag="tell_end"):
    """Answered with how the rank has ended, waited for some seconds."""


class EndRank(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """End the rank and what it has started: let it end by itself first where ``gently``; answered with its end."""

    gently: bool


class Over(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """The session is over, with this exit code."""

    code: int


Order = StartRank | Mark | ShowStacks | ShowPrinted | TellEnd | EndRank | Over


class Present(msgspec.Struct, frozen=True, kw_only=True, tag="present"):
    """A supervisor's device: its SKU, or why there is none."""

    sku: str | None = None
    error: str | None = None


class PrintedLines(msgspec.Struct, frozen=True, kw_only=True, tag="lines"):
    """The last lines of what the rank has printed."""

    lines: list[str]


class RankEnd(msgspec.Struct, frozen=True, kw_only=True, tag="rank_end"):
    """An exit code, or less the number of a signal; None where the rank runs."""

    code: int | None


Answer = Present | PrintedLines | RankEnd
