"""What torch.compile does is recorded apart, what it leaves to eager mode is named, and samples hold none of it."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch

from perfsuite.measure import attempt as attempt_module
from perfsuite.measure.attempt import AttemptSpec, attempt
from perfsuite.measure.bench import Bench
from perfsuite.measure.clock import FakeClock
from perfsuite.measure.compilation import (
    RecompiledError,
    compilation,
    forget,
    graphs_compiled,
    quiet_compiler,
    refuse_recompilation,
)
from perfsuite.measure.measurement import CeilingSample, Measurement
from perfsuite.verdict import Failure, Outcome
from perfsuite.workloads.base import Step, Target
from perfsuite.workloads.kernel import Kernel


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test starts and ends without compiled code."""
    import torch._dynamo  # noqa: F401 - so that there is something to forget

    forget()
    yield
    forget()


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Traced as ever, but not made into machine code, which takes half a minute."""
    return torch.compile(function, backend="eager", dynamic=False)


def clean(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    print(end="")  # noqa: T201 - what the compiler cannot trace
    return y.cos()


def test_a_whole_graph_has_nothing_to_report() -> None:
    compiled(clean)(torch.ones(3))
    found = compilation(expected=True)
    assert found is not None
    assert (found.graphs, found.graph_breaks, found.fallbacks) == (1, (), ())
    assert found.seconds > 0


def test_a_graph_break_is_named_with_what_caused_it() -> None:
    compiled(broken)(torch.ones(3))
    found = compilation(expected=True)
    assert found is not None
    assert found.graphs == 2
    (reason,) = found.graph_breaks
    assert "print" in reason
    assert "\n" not in reason
    assert found.fallbacks == ()


def test_a_step_that_was_not_compiled_at_all_fell_back() -> None:
    torch.compile(torch.compiler.disable(clean), backend="eager")  # type: ignore[no-untyped-call] # torch leaves it untyped
    found = compilation(expected=True)
    assert found is not None
    assert (found.graphs, found.fallbacks) == (0, ("nothing was compiled",))


def test_too_many_recompilations_are_a_fallback() -> None:
    step = compiled(clean)
    for size in range(2, 14):
        step(torch.ones(size))
    found = compilation(expected=True)
    assert found is not None
    assert any("recompile" in reason.lower() for reason in found.fallbacks)


def test_a_case_that_compiles_nothing_has_nothing_to_tell() -> None:
    assert compilation(expected=False) is None


def test_what_an_earlier_case_compiled_is_forgotten() -> None:
    compiled(broken)(torch.ones(3))
    forget()
    assert compilation(expected=False) is None
    compiled(clean)(torch.ones(3))
    found = compilation(expected=False)
    assert found is not None
    assert (found.graphs, found.graph_breaks) == (1, ())


def test_a_recompilation_is_refused() -> None:
    step = compiled(clean)
    step(torch.ones(3))
    before = graphs_compiled()
    refuse_recompilation(before)
    step(torch.ones(4))
    with pytest.raises(RecompiledError, match="compiled 1 more graph"):
        refuse_recompilation(before)


@pytest.mark.parametrize(
    ("module", "category", "passes"),
    [
        ("torch.jit._script", DeprecationWarning, True),
        ("torch._inductor.compile_fx", UserWarning, True),
        ("torch.nn.modules", UserWarning, False),
        ("mine", DeprecationWarning, False),
        ("torchless", DeprecationWarning, False),
    ],
)
def test_only_what_torch_warns_itself_of_is_passed_over(module: str, category: type[Warning], passes: bool) -> None:
    """Warnings are errors here, as in many projects."""
    with nullcontext() if passes else pytest.raises(category), quiet_compiler():
        warnings.warn_explicit("old", category, "file.py", 1, module=module)


def bench() -> Bench:
    known = {
        key: CeilingSample(key=key, rate_per_s=1e12, unit="FLOP/s", detail="known")
        for key in ("compute.fp32", "memory", "memory.1000")
    }
    return Bench(torch_device="cpu", target=Target(backend="cpu", sku="cpu-test"), clock=FakeClock(), ceilings=known)


@pytest.fixture
def no_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the fake clock a real control takes no time."""
    monkeypatch.setattr(attempt_module, "control_for", lambda **case: None)


def ticking(here: Bench, function: Callable[[], torch.Tensor]) -> Step:
    """``function``, which takes a millisecond of the bench's clock."""

    def step() -> torch.Tensor:
        assert isinstance(here.clock, FakeClock)
        here.clock.advance(0.001)
        return function()

    return step


SPEC = AttemptSpec(budget_s=1.0, iteration_limit_s=1.0)


def test_a_users_own_compiled_kernel_is_recorded_too(no_control: None) -> None:
    here = bench()

    def build(device: str) -> Step:
        x, step = torch.ones(3), compiled(broken)
        return ticking(here, lambda: step(x))

    result = attempt(Kernel(build, flops=1000, nbytes=1000), SPEC, here)
    assert isinstance(result, Measurement)
    assert result.compilation is not None
    assert (result.compilation.graphs, len(result.compilation.graph_breaks)) == (2, 1)


def test_a_step_compiled_again_while_it_is_sampled_is_an_error(no_control: None) -> None:
    here = bench()

    def build(device: str) -> Step:
        step, sizes = compiled(clean), iter(range(2, 1000))
        return ticking(here, lambda: step(torch.ones(min(next(sizes), 5))))

    result = attempt(Kernel(build, flops=1000, nbytes=1000), SPEC, here)
    assert isinstance(result, Failure)
    assert result.outcome is Outcome.ERROR
    assert "graph(s) while the step was measured" in result.reason


def test_the_record_of_an_eager_case_tells_of_no_compiler(no_control: None) -> None:
    here = bench()
    result = attempt(Kernel(lambda device: ticking(here, lambda: torch.ones(3)), flops=1000, nbytes=1000), SPEC, here)
    assert isinstance(result, Measurement)
    assert result.compilation is None


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_backward_graphs_count_as_compilation() -> None:
    x = torch.ones(3, requires_grad=True)
    torch.compile(clean, backend="aot_eager", dynamic=False)(x).sum().backward()  # type: ignore[no-untyped-call] # as above
    found = compilation(expected=True)
    assert found is not None
    assert found.graphs == 1
