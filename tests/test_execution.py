"""How a step is run, and where it cannot be."""

from __future__ import annotations

import shutil
import sys

import pytest

from perfsuite.workloads.base import Target
from perfsuite.workloads.execution import EXECUTIONS, compiled, launch_of, why_not

CPU = Target(backend="cpu", sku="cpu-x")
XPU = Target(backend="xpu", sku="x")
HOPPER = Target(backend="cuda", sku="h100", compute_capability="9.0")
PASCAL = Target(backend="cuda", sku="p100", compute_capability="6.0")
MI300 = Target(backend="rocm", sku="mi300x")


@pytest.mark.parametrize("target", [CPU, XPU, PASCAL, HOPPER, MI300])
def test_every_device_runs_a_step_as_it_is(target: Target) -> None:
    assert why_not("eager", target) is None


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("target", [HOPPER, MI300])
def test_new_gpus_run_all(execution: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)  # a GPU's kernels need no C++
    assert why_not(execution, target) is None


@pytest.mark.parametrize(
    ("execution", "target", "reason"),
    [
        ("graph", CPU, "CUDA graphs need a GPU"),
        ("graph", XPU, "no CUDA graphs on xpu"),
        ("compile", PASCAL, "torch.compile needs compute capability 7.0, this device's is 6.0"),
    ],
)
def test_what_a_device_lacks_is_said(execution: str, target: Target, reason: str) -> None:
    assert why_not(execution, target) == reason


@pytest.mark.parametrize(
    ("platform", "variable", "compiler"),
    [("linux", "", "g++"), ("darwin", "", "clang++"), ("linux", "/opt/llvm/bin/clang++", "/opt/llvm/bin/clang++")],
)
def test_compiling_for_a_cpu_needs_the_compiler_that_torch_asks_for(
    platform: str, variable: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("CXX", variable)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == compiler else None)
    assert why_not("compile", CPU) is None
    monkeypatch.setattr(shutil, "which", lambda name: None if name == compiler else name)
    assert why_not("compile", CPU) == f"torch.compile needs the C++ compiler {compiler}, which is not here"


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_an_execution_is_a_launch(execution: str) -> None:
    assert launch_of(execution) == execution


def test_nothing_is_compiled_where_there_are_no_numbers() -> None:
    assert compiled(len, device="meta") is len


def test_torchs_own_warnings_are_not_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    # Warnings are errors here, and in the middle of a compilation they would end it.
    monkeypatch.delitem(sys.modules, "torch.utils.mkldnn", raising=False)
    assert compiled(len, device="cpu") is not len
    assert "torch.utils.mkldnn" in sys.modules
