"""Transformer layers: FLOPs, bytes and memory by hand and by measurement; every way to run one gives the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from perfsuite.errors import CaseError
from perfsuite.flops import FlopPart
from perfsuite.measure.check import check_agreement, prepared
from perfsuite.measure.memory import peak_memory_bytes
from perfsuite.workloads.attention import Attention
from perfsuite.workloads.base import Prepared, Target
from perfsuite.workloads.counting import count_flops
from perfsuite.workloads.transformer import TransformerLayer
from tests.module_support import one_thread

CPU = Target(backend="cpu", sku="cpu-x")
HOPPER = Target(backend="cuda", sku="h100", compute_capability="9.0")

# tiny-gpt: width 128, 4 heads of 32, MLP of 512, biases.
QKV, OUT, UP, DOWN = 128 * 384, 128 * 128, 128 * 512, 512 * 128
TINY_GPT_PARAMETERS = (QKV + 384) + (OUT + 128) + (UP + 512) + (DOWN + 128) + 2 * 2 * 128


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def layer(**changes: Any) -> TransformerLayer:
    return TransformerLayer(**{"model": "tiny-gpt", "batch": 2, "seq_len": 8, **changes})


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only what comes before code is generated: tracing, in one graph or with an error."""
    import torch

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    yield
    torch.compiler.reset()


def part(workload: TransformerLayer, name: str) -> FlopPart:
    return next(each for each in workload.parts() if each.name == name)


def agreement(workload: TransformerLayer, built: Prepared) -> None:
    assert built.reference is not None
    check_agreement(built.step(), built.reference(), rtol=workload.rtol, atol=workload.atol)


def test_flops_by_hand() -> None:
    # 16 tokens; 4 heads of 32 look at 36 pairs in each of 2 sequences, and do two matmuls.
    forward = 2 * 16 * (QKV + OUT + UP + DOWN) + 2 * 2 * 2 * 4 * 36 * 32
    work, both = layer().work(), layer(backward=True).work()
    assert work.flops == work.hardware_flops == forward
    assert both.flops == both.hardware_flops == 3 * forward
    assert work.tokens == both.tokens == 16


def test_bytes_by_hand() -> None:
    once = TINY_GPT_PARAMETERS + 2 * 16 * 128
    assert layer().work().nbytes == 4 * once
    assert layer(dtype="bf16").work().nbytes == 2 * once
    assert layer(backward=True).work().nbytes == 2 * 4 * once  # and a gradient of each


def test_recomputation_counts_for_the_hardware_alone() -> None:
    kept, again = layer(backward=True).work(), layer(backward=True, checkpoint=True).work()
    assert again.flops == kept.flops
    # All of the forward pass but the last matmul, whose output nothing needs.
    forward = (kept.flops or 0) // 3
    assert again.hardware_flops == (kept.flops or 0) + forward - 2 * 16 * DOWN
    assert again.nbytes == kept.nbytes


def test_a_mixture_counts_its_router_and_the_pairs_it_computes() -> None:
    # tiny-moe: 4 experts, 2 of them active, gate and up of 256 each. One token a sequence, 16 in all.
    pairs = 2 * 16
    balanced = layer(model="tiny-moe", batch=16, seq_len=1)
    assert part(balanced, "mlp_up").forward == 2 * pairs * 128 * 512
    assert part(balanced, "mlp_down").forward == 2 * pairs * 256 * 128
    assert part(balanced, "router").forward == 2 * 16 * 128 * 4
    dropping = layer(model="tiny-moe", batch=16, seq_len=1, routing="skewed", capacity_factor=0.5)
    kept = dropping.routed.kept if dropping.routed else 0
    assert 4 <= kept <= 4 * 4  # four tokens for each expert at most
    assert part(dropping, "mlp_down").forward == 2 * kept * 256 * 128


def test_idle_experts_are_not_read() -> None:
    one, many = (layer(model="tiny-moe", batch=batch, seq_len=1) for batch in (1, 2))
    expert = 3 * 128 * 256
    assert (many.work().nbytes or 0) - (one.work().nbytes or 0) == 4 * (2 * expert + 2 * 128)
    skewed = layer(model="tiny-moe", batch=1, seq_len=1, routing="skewed")
    assert skewed.work().nbytes == one.work().nbytes


def test_data_types_of_their_own() -> None:
    split = dict(layer(model="tiny-moe", dtype="bf16").work().flops_by_dtype)
    assert split["fp32"] == 2 * 16 * 128 * 4  # the router's
    assert dict(layer(model="tiny-moe").work().flops_by_dtype).keys() == {"fp32"}
    tf32 = layer(model="tiny-moe", dtype="tf32")
    assert dict(tf32.work().flops_by_dtype).keys() == {"tf32"}, "torch's switch to TF32 is for the router's matmul too"
    widened = layer(dtype="bf16", attention="math")
    assert dict(widened.work().flops_by_dtype)["fp32"] == part(widened, "attention").forward


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt5"}, "model='gpt5' is not known; use one of gpt2-124m"),
        ({"batch": 0}, "TransformerLayer: batch=0 must be a whole number of at least 1"),
        ({"seq_len": 1.5}, "TransformerLayer: seq_len=1.5 must be a whole number"),
        ({"backward": 1}, "TransformerLayer: backward=1 must be True or False"),
        ({"execution": "jit"}, "TransformerLayer: execution='jit' must be one of eager, compile, graph"),
        ({"attention": "flex"}, "TransformerLayer: attention='flex' must be one of auto, flash, efficient, math"),
        ({"dtype": "fp8"}, "TransformerLayer: dtype='fp8' must be one of fp32, tf32, bf16, fp16"),
        ({"checkpoint": True}, "TransformerLayer: checkpoint=True needs backward=True"),
        ({"routing": "skewed"}, "TransformerLayer: routing='skewed' needs experts, and tiny-gpt has none"),
        ({"capacity_factor": 1.0}, "TransformerLayer: capacity_factor=1.0 needs experts"),
        ({"model": "tiny-moe", "routing": "random"}, "TransformerLayer: routing='random' must be one of balanced"),
        ({"model": "tiny-moe", "capacity_factor": 0.0}, "capacity_factor=0.0 must be a number above 0"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        layer(**changes)


@pytest.mark.parametrize(
    ("changes", "target", "reason"),
    [
        ({"execution": "graph"}, CPU, "CUDA graphs need a GPU"),
        ({"dtype": "tf32"}, CPU, "no TF32"),
        ({"attention": "cudnn"}, CPU, "no cuDNN on a CPU"),
        ({"attention": "flash"}, HOPPER, "torch's flash kernel takes bf16 and fp16 on a GPU, not fp32"),
        ({"model": "tiny-llama", "attention": "efficient"}, HOPPER, "torch's efficient kernel takes no grouped heads"),
    ],
)
def test_what_a_device_lacks_is_said(changes: dict[str, Any], target: Target, reason: str) -> None:
    assert layer(**changes).unsupported(target) == reason
    assert layer().unsupported(target) is None


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layer(execution="compile").unsupported(HOPPER) is None
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert "needs the C++ compiler" in (layer(execution="compile").unsupported(CPU) or "")


def test_the_record_says_how_it_ran() -> None:
    assert layer(execution="graph").launch() == "graph"
    assert layer().launch() == "eager"
    assert layer(model="tiny-moe").describe()["routing"] == "balanced"
    assert layer().describe()["routing"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"backward": True, "attention": "flash"},
        {"backward": True, "checkpoint": True, "execution": "compile"},
        {"model": "tiny-llama", "backward": True, "dtype": "bf16"},
        {"model": "tiny-moe", "backward": True, "checkpoint": True},
        {"model": "tiny-moe", "backward": True, "routing": "skewed", "capacity_factor": 0.75, "dtype": "bf16"},
    ],
)
def test_torchs_counter_agrees(changes: dict[str, Any]) -> None:
    workload = layer(seq_len=16, **changes)
    assert count_flops(prepared(workload.build("meta")).step) == sum(each.counted for each in workload.parts())


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("model", "seq_len", "options"),
    [
        ("tiny-gpt", 64, {}),
        ("tiny-gpt", 256, {}),
        ("tiny-gpt", 256, {"attention": "math"}),
        ("tiny-llama", 64, {}),
        ("tiny-llama", 256, {}),
        ("tiny-moe", 64, {}),
        ("tiny-moe", 256, {"routing": "skewed"}),
        ("gpt2-124m", 32, {}),
    ],
)
def test_predicted_memory_is_what_is_measured(
    model: str, seq_len: int, options: dict[str, Any], backward: bool
) -> None:
    workload = layer(model=model, seq_len=seq_len, backward=backward, **options)
    built = workload.build("cpu")
    assert built.resident_bytes is not None
    measured = (peak_memory_bytes(built.step, "cpu") or 0) + built.resident_bytes()
    assert workload.memory_bytes() == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("options", [{}, {"backward": True}, {"backward": True, "checkpoint": True}])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["tiny-gpt", "tiny-llama"])
def test_the_scores_of_unfused_attention_are_all_predicted(model: str, dtype: str, options: dict[str, Any]) -> None:
    """At 1024 tokens they are nine tenths of the memory: two of their size forward, three backward."""
    workload = layer(model=model, batch=1, seq_len=1024, attention="math", dtype=dtype, **options)
    built = workload.build("cpu")
    assert built.resident_bytes is not None
    measured = (peak_memory_bytes(built.step, "cpu") or 0) + built.resident_bytes()
    assert workload.memory_bytes() == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("model", ["gpt2-124m", "llama3-8b"])
def test_a_layer_holds_what_its_attention_alone_does(model: str, backward: bool) -> None:
    """Where scores are nearly everything, the two predictions are nearly the same."""
    whole = layer(model=model, batch=1, seq_len=16384, attention="math", dtype="bf16", backward=backward)
    shape = whole.shape
    alone = Attention(
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        q_len=16384,
        head_dim=shape.head_dim,
        backend="math",
        dtype="bf16",
        backward=backward,
    )
    assert whole.memory_bytes() == pytest.approx(alone.memory_bytes(), rel=0.05)


def test_memory_of_many_tokens_is_found_without_looking_at_each() -> None:
    workload = layer(model="mixtral-8x7b", batch=65536, seq_len=8192, routing="skewed", capacity_factor=1.25)
    assert (workload.memory_bytes() or 0) > 1e12


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint": True},
        {"attention": "math"},
        {"attention": "math", "checkpoint": True, "model": "tiny-llama"},
        {"attention": "math", "dtype": "bf16"},
        {"checkpoint": True, "model": "tiny-moe", "routing": "skewed"},
    ],
)
def test_every_way_to_run_a_layer_gives_the_same(changes: dict[str, Any]) -> None:
    workload = layer(backward=True, **changes)
    agreement(workload, workload.build("cpu"))


def test_a_plain_layer_has_no_reference() -> None:
    assert layer(backward=True).build("cpu").reference is None


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("changes", [{"checkpoint": True}, {"model": "tiny-moe", "routing": "skewed"}])
def test_a_layer_is_captured_whole_and_gives_the_same(changes: dict[str, Any]) -> None:
    workload = layer(backward=True, batch=1, seq_len=4, execution="compile", **changes)
    agreement(workload, workload.build("cpu"))


def test_the_backward_pass_hands_out_the_inputs_gradient() -> None:
    import torch

    built = layer(backward=True).build("cpu")
    y, gradient = built.step()
    assert y.shape == gradient.shape == (2, 8, 128)
    assert not y.requires_grad
    inputs = built.step.__self__  # type: ignore[attr-defined] # the step is a method
    expected = torch.autograd.grad(inputs.block(inputs.x), inputs.x, inputs.gradient)[0]
    assert torch.equal(gradient, expected)
    assert inputs.x.grad is None  # nothing adds up from step to step


@pytest.mark.parametrize(("attention", "kernels"), [("flash", 1), ("math", 0)])
def test_a_named_kernel_is_the_one_that_runs(attention: str, kernels: int) -> None:
    from torch.autograd.profiler import profile

    built = layer(backward=True, checkpoint=True, attention=attention).build("cpu")
    with profile() as seen:
        built.step()
    names = {event.name for event in seen.function_events}
    assert sum(name == "aten::_scaled_dot_product_flash_attention_for_cpu" for name in names) == kernels
