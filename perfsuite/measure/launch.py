"""How short kernels reach a GPU: launched one by one, or captured in a graph so that no launch is timed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfsuite.hardware.catalogue import Hardware
from perfsuite.measure.clock import Step

GRAPH_STEPS = 50
"""So many steps share one launch."""
LAUNCH_S = 20e-6
"""A step whose roofline time is below this would be timed as its launch."""


def launch_mode(metric: str, flops: int, nbytes: int | None, dtype: str, hardware: Hardware | None) -> str:
    """``graph`` where the data sheet says that the work is shorter than a launch, else ``eager``.

    It is decided by arithmetic alone, since it is part of what a baseline is compared by.
    """
    if hardware is None or metric == "latency_us":
        return "eager"
    peak, bandwidth = hardware.flops_per_s(dtype), hardware.memory_bytes_per_s
    compute_s = flops / peak if peak else 0.0
    memory_s = (nbytes or 0) / bandwidth if bandwidth else 0.0
    return "graph" if 0 < max(compute_s, memory_s) < LAUNCH_S else "eager"


class NotCapturedError(Exception):
    """A step does something that a graph cannot hold."""


def capture(steps: Sequence[Step], count: int) -> Step:
    """The replay of one graph that holds ``count`` steps, ``steps`` in turn; a NotCapturedError where it cannot be."""
    import torch

    try:
        for step in steps:
            step()  # what a first call compiles or tunes cannot be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(count):
                steps[turn % len(steps)]()
    except RuntimeError as error:
        torch.cuda.synchronize()
        raise NotCapturedError(f"the step cannot be captured in a CUDA graph: {str(error).splitlines()[0]}") from None
    return graph.replay


def graph_steps(copies: int) -> int:
    """How many steps shorter than a launch one graph holds: at least GRAPH_STEPS, and each copy equally often."""
    return copies * math.ceil(GRAPH_STEPS / copies)
