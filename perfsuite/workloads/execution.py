"""How a step is run: as written, compiled by torch, or replayed from a CUDA graph."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from perfsuite.workloads.base import Target

EXECUTIONS = ("eager", "compile", "graph")
GRAPH_BACKENDS = ("cuda", "rocm")
TRITON_CAPABILITY = (7, 0)


def why_not(execution: str, target: Target) -> str | None:
    """Why ``target`` cannot run a step by ``execution``, in a few words; None where it can."""
    if execution == "graph" and target.backend not in GRAPH_BACKENDS:
        return "CUDA graphs need a GPU" if target.backend == "cpu" else f"no CUDA graphs on {target.backend}"
    return _why_not_compiled(target) if execution == "compile" else None


def _why_not_compiled(target: Target) -> str | None:
    """torch.compile writes C++ for a CPU, and Triton kernels for a GPU."""
    if target.backend == "cpu":
        compiler = _cpp_compiler()
        return None if shutil.which(compiler) else f"torch.compile needs the C++ compiler {compiler}, which is not here"
    if target.backend == "cuda" and target.compute_capability and not target.at_least(*TRITON_CAPABILITY):
        return f"torch.compile needs compute capability 7.0, this device's is {target.compute_capability}"
    return None


def _cpp_compiler() -> str:
    """The compiler that torch will ask for."""
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return os.environ.get("CXX") or default


def launch_of(execution: str) -> str:
    """What a workload's ``launch()`` returns: graphs are the harness's work, compiling that of ``build``.

    ``eager`` is said too, or the harness would capture a short step in a graph of its own accord.
    """
    return execution


def compiled(function: Callable[..., Any], *, device: str) -> Callable[..., Any]:
    """``function`` (or a module) by torch.compile for shapes that never change; as it is on ``meta``.

    Compilation happens in the first call.
    """
    if device == "meta":
        return function
    import torch

    with warnings.catch_warnings():
        # The compiler imports it in the middle of its work, and it warns of being outdated: not the user's fault.
        warnings.simplefilter("ignore", DeprecationWarning)
        import_module("torch.utils.mkldnn")
    return torch.compile(function, dynamic=False)
