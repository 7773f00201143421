"""What ``torch.compile`` did while a step was built: how long it took, and what of the step runs eagerly after all."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from perfsuite.measure.measurement import Compilation

_PHASES = ("_compile.compile_inner", "backward._backward_impl")
"""The outermost timers of forward and backward graphs."""
_LONGEST = 200


class RecompiledError(Exception):
    """A step was compiled again while it was measured, so that samples hold compilation."""


@contextmanager
def quiet_compiler() -> Iterator[None]:
    """Pass over what torch warns itself of: a project that makes errors of warnings could not compile anything."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
        warnings.filterwarnings("ignore", module=r"torch\.(_inductor|_dynamo|_functorch)")
        yield


def forget() -> None:
    """Drop what earlier cases of this process have compiled: their guards would count against this one's."""
    if "torch._dynamo" in sys.modules:
        import torch

        torch.compiler.reset()
        _tables().counters.clear()
        _tables().compilation_time_metrics.clear()


def compilation(*, expected: bool) -> Compilation | None:
    """What was compiled since `forget`; None where nothing was, and none was ``expected``."""
    graphs = graphs_compiled()
    if not graphs and not expected:
        return None
    counters = _tables().counters if "torch._dynamo" in sys.modules else {}
    fallbacks = _reasons(counters.get("unimplemented", {})) if _eager_frames(counters) else ()
    if not graphs:
        fallbacks = fallbacks or ("nothing was compiled",)
    return Compilation(
        seconds=_seconds(),
        graphs=graphs,
        graph_breaks=_reasons(counters.get("graph_break", {})),
        fallbacks=fallbacks,
    )


def graphs_compiled() -> int:
    """How many graphs were compiled since `forget`."""
    if "torch._dynamo" not in sys.modules:
        return 0
    return int(_tables().counters["stats"]["unique_graphs"])


def refuse_recompilation(before: int) -> None:
    """A RecompiledError where more than ``before`` graphs are compiled by now."""
    if (graphs := graphs_compiled()) > before:
        raise RecompiledError(
            f"torch.compile compiled {graphs - before} more graph(s) while the step was measured; "
            "give it the same shapes and data types in every call"
        )


def _tables() -> Any:
    """The compiler's counters and timers; torch has no public form of them."""
    import torch._dynamo.utils

    return torch._dynamo.utils  # noqa: SLF001 - see above


def _seconds() -> float:
    """Seconds in the compiler, forward and backward graphs together."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    timers = _tables().compilation_time_metrics
    return float(sum(sum(timers.get(phase, ())) for phase in _PHASES))


def _eager_frames(counters: Mapping[str, Mapping[Any, int]]) -> int:
    """How many functions the compiler gave up on."""
    frames = counters.get("frames", {})
    return int(frames.get("total", 0) - frames.get("ok", 0))


def _reasons(counts: Mapping[Any, int]) -> tuple[str, ...]:
    """One line a reason: what the compiler says first, what exactly it met, and how often."""
    return tuple(_line(str(reason)) + (f" ({count} times)" if count > 1 else "") for reason, count in counts.items())


def _line(reason: str) -> str:
    """The first line of a reason, and its developer context where there is one."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    context = next((line.partition(":")[2] for line in lines if line.startswith("Developer debug context:")), "")
    return (
        " ".join([lines[0], *([f"[{context.strip()}]"] if context.strip() else [])])[:_LONGEST] if lines else "unknown"
    )
