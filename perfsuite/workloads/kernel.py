"""Any callable as a workload: what it does is declared, or its FLOPs are counted once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from perfsuite.errors import CaseError
from perfsuite.workloads.base import Built, Description, Work, Workload, non_negative_count


@dataclass(frozen=True, kw_only=True)
class Kernel(Workload):
    """``build(device)`` returns the step, or the step and its reference: two callables on the same inputs.

    ``flops`` left out are counted once in the worker. ``nbytes`` is each distinct input once and each output once.
    ``rtol`` and ``atol`` hold for the comparison with the reference; left out, they are torch's for the data type.
    """

    kind = "kernel"
    fill = "own"
    sized = False  # what is declared by hand may be wrong, and is to be found out instead of skipped

    build: Callable[[str], Built] = field(kw_only=False)
    flops: int | float | None = None
    nbytes: int | float | None = None
    rtol: float | None = None
    atol: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.build):
            raise CaseError(f"Kernel: build={self.build!r} must be callable with a device")
        for name in ("flops", "nbytes"):
            if getattr(self, name) is not None:
                non_negative_count("Kernel", name, getattr(self, name))
        for name in ("rtol", "atol"):
            _tolerance(name, getattr(self, name))

    def work(self) -> Work:
        """``declared`` where the case gives its FLOPs, ``counted`` where torch's counter has to."""
        flops, nbytes = (None if value is None else int(value) for value in (self.flops, self.nbytes))
        return Work(flops=flops, nbytes=nbytes, flop_convention="counted" if flops is None else "declared")

    def memory_bytes(self) -> int | None:
        """Not known before it runs."""
        return None

    def describe(self) -> Description:
        """The parameters, and the qualified name of ``build``: no address, so that it is the same in every run."""
        return {**super().describe(), "build": _qualified_name(self.build)}


def _tolerance(name: str, value: object) -> None:
    """Nothing where ``value`` is None or a finite number of at least 0."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise CaseError(f"Kernel: {name}={value!r} must be a finite number of at least 0")


def _qualified_name(function: Callable[..., object]) -> str:
    """Module and name of a function, of what a partial calls, or of a callable object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
