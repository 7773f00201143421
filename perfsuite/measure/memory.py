"""Peak memory of a step: the allocator's on a GPU, a profiled step's on a CPU."""

from __future__ import annotations

from perfsuite.measure.clock import Step


def peak_memory_bytes(step: Step, backend: str) -> int | None:
    """Bytes at the peak; on a CPU what the second of two steps held above what was there before it."""
    if backend == "cpu":
        return _profiled_peak_bytes(step)
    import torch

    if backend == "xpu":
        torch.xpu.reset_peak_memory_stats()
        step()
        torch.xpu.synchronize()
        return int(torch.xpu.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def _profiled_peak_bytes(step: Step) -> int:
    """The running sum of the profiler's allocations and frees, at its highest."""
    from torch.autograd.profiler import profile  # torch.profiler's imports the compiler, a second for each worker

    step()
    with profile(profile_memory=True) as profiler:
        step()
    held = peak = 0
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
