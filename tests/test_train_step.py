"""Training steps: FLOPs in every convention, memory as measured, and a loss that has to fall."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from perfsuite.errors import CaseError
from perfsuite.flops import MFU_CONVENTIONS, training_flops_per_token
from perfsuite.measure.memory import peak_memory_bytes
from perfsuite.models import MODELS, model_shape
from perfsuite.workloads import train_step
from perfsuite.workloads.base import Prepared, Target
from perfsuite.workloads.counting import count_flops
from perfsuite.workloads.input_pipeline import InputPipeline
from perfsuite.workloads.optimizers import OPTIMIZERS, optimizer_for
from perfsuite.workloads.train_step import TrainStep
from perfsuite.workloads.training import Training
from tests.module_support import one_thread


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


CPU = Target(backend="cpu", sku="cpu-test")


def tiny(**changes: Any) -> TrainStep:
    return TrainStep(**{"model": "tiny-gpt", "batch": 2, "seq_len": 16, **changes})


def training(case: TrainStep) -> Training:
    """What a built step belongs to."""
    check = case.build("cpu").check
    assert check is not None
    found = check.__self__  # type: ignore[attr-defined] # a bound method
    assert isinstance(found, Training)
    return found


def check(case: TrainStep) -> str | None:
    found = case.build("cpu").check
    assert found is not None
    return found()


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("tiny")])
def test_parts_add_up_to_the_exact_convention(name: str) -> None:
    case = TrainStep(model=name, batch=3, seq_len=512, accumulate=2, dtype="bf16")
    work = case.work()
    assert work.tokens == 2 * 3 * 512
    assert work.flops == work.tokens * training_flops_per_token(MODELS[name], seq_len=512)
    assert dict(work.flops_by_convention) == {
        each: work.tokens * training_flops_per_token(MODELS[name], seq_len=512, convention=each)
        for each in MFU_CONVENTIONS
    }
    assert sum(dict(work.flops_by_dtype).values()) == work.flops


def test_fewer_layers_are_a_smaller_model() -> None:
    case = TrainStep(model="gpt3-175b", layers=1, batch=1, seq_len=2048, dtype="bf16")
    one = model_shape("gpt3-175b", layers=1)
    assert case.work().flops == 2048 * training_flops_per_token(one, seq_len=2048)
    assert case.memory_parts()["parameters"] == 2 * one.parameters()


def test_accumulation_of_four_is_four_times_the_work() -> None:
    one, four = (tiny(accumulate=count).work() for count in (1, 4))
    assert (four.flops, four.tokens, four.hardware_flops) == (
        4 * (one.flops or 0),
        4 * one.tokens,
        4 * (one.hardware_flops or 0),
    )


def test_recomputation_is_not_in_mfu() -> None:
    plain, again = (TrainStep(batch=1, seq_len=1024, checkpoint=on).work() for on in (False, True))
    assert plain.hardware_flops == plain.flops == again.flops
    assert (again.hardware_flops or 0) > (again.flops or 0)
    # Of every layer all forward matmuls but the last are done again.
    shape = MODELS["gpt2-124m"]
    causal = 4 * shape.attention_width * (1024 * 1025 // 2)
    matmuls = 2 * 1024 * (shape.qkv_weights + shape.out_weights + shape.mlp_up_weights)
    assert (again.hardware_flops or 0) - (again.flops or 0) == shape.layers * (causal + matmuls)


def test_checkpointing_holds_less() -> None:
    # Deep enough for activations to be what counts, not the optimizer's step.
    plain, again = (tiny(batch=8, seq_len=32, layers=4, optimizer="sgd", checkpoint=on) for on in (False, True))
    assert (again.memory_bytes() or 0) < 0.7 * (plain.memory_bytes() or 0)
    assert measured_bytes(again) < 0.7 * measured_bytes(plain)


def measured_bytes(case: TrainStep) -> int:
    built = case.build("cpu")
    peak = peak_memory_bytes(built.step, "cpu")
    assert peak is not None
    assert built.resident_bytes is not None
    return peak + built.resident_bytes()


@pytest.mark.parametrize(
    ("case", "within"),
    [
        (tiny(batch=8, seq_len=64), 0.02),
        (tiny(batch=4, seq_len=64, checkpoint=True, layers=4, optimizer="adamw_fused"), 0.03),
        (tiny(batch=4, seq_len=64, accumulate=2, optimizer="adamw_fused"), 0.02),
        (tiny(dtype="bf16", autocast=True, batch=4, seq_len=32, optimizer="sgd"), 0.02),
        (tiny(dtype="bf16", batch=4, seq_len=32, optimizer="sgd"), 0.02),
        # Where the optimizer's step is the peak, what a GPU's holds is more than a CPU's: here by a sixth.
        (tiny(batch=1, seq_len=16), 0.2),
        (tiny(batch=1, seq_len=16, optimizer="adamw_fused"), 0.02),
        # A CPU's RMSNorm keeps its normalised input, a GPU's does not.
        (tiny(model="tiny-llama", batch=8, seq_len=64), 0.1),
        (tiny(model="tiny-llama", batch=2, seq_len=64, optimizer="sgd", checkpoint=True), 0.1),
        (tiny(model="tiny-moe", batch=4, seq_len=64, optimizer="sgd"), 0.1),
        (tiny(batch=2, seq_len=8, optimizer="sgd"), 0.02),
    ],
    ids=lambda value: "-".join(map(str, value.describe().values())) if isinstance(value, TrainStep) else None,
)
def test_memory_is_what_was_predicted(case: TrainStep, within: float) -> None:
    assert case.memory_bytes() == pytest.approx(measured_bytes(case), rel=within)


def test_memory_by_hand() -> None:
    parts = TrainStep(batch=1, seq_len=1, optimizer="adamw").memory_parts()
    assert parts["parameters"] == 4 * 124_439_808
    assert parts["optimizer_state"] == 8 * 124_439_808
    assert parts["inputs"] == 2 * 8
    assert TrainStep(batch=1, seq_len=1, optimizer="sgd").memory_parts()["optimizer_state"] == 0
    narrow = TrainStep(batch=1, seq_len=1, dtype="bf16").memory_parts()
    assert narrow["parameters"] == 2 * 124_439_808
    autocast = TrainStep(batch=1, seq_len=1, dtype="bf16", autocast=True).memory_parts()
    assert autocast["parameters"] == parts["parameters"]


def test_llama_7b_does_not_fit_80_gb_with_adam() -> None:
    case = TrainStep(model="llama2-7b", batch=1, seq_len=4096, dtype="bf16", autocast=True, checkpoint=True)
    assert (case.memory_bytes() or 0) > 16 * 6_738_415_616 > 80e9


def test_bytes_by_hand() -> None:
    ids = 2 * 17 * 8
    assert tiny(optimizer="sgd").work().nbytes == 2 * 4 * MODELS["tiny-gpt"].parameters() + ids + 4
    adam = tiny(dtype="bf16", accumulate=3).work().nbytes
    assert adam == 3 * 2 * 2 * MODELS["tiny-gpt"].parameters() + 3 * ids + 4


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("model", ["tiny-gpt", "tiny-llama", "tiny-moe"])
def test_flops_are_what_the_counter_finds_on_meta(model: str, checkpoint: bool) -> None:
    assert_counted(tiny(model=model, checkpoint=checkpoint))


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw_fused", "execution": "compile"},
        {"optimizer": "sgd", "clip": None},
        {"accumulate": 2, "autocast": True, "dtype": "bf16"},
    ],
    ids="-".join,
)
def test_flops_are_counted_however_the_step_is_made(changes: dict[str, Any]) -> None:
    assert_counted(tiny(model="tiny-moe", **changes))


def assert_counted(case: TrainStep) -> None:
    assert count_flops(case.build("meta").step) == sum(part.counted for part in case.parts())


def test_a_pipeline_is_left_out_on_meta() -> None:
    built = tiny(input=InputPipeline(batch_s=60.0)).build("meta")
    assert built.close is None
    assert built.step().shape == ()


@pytest.mark.parametrize(
    "case",
    [
        *(tiny(model=model, optimizer=name) for model in ("tiny-gpt", "tiny-llama", "tiny-moe") for name in OPTIMIZERS),
        tiny(dtype="bf16", batch=1),
        tiny(dtype="bf16", batch=1, optimizer="sgd"),
        tiny(dtype="bf16", batch=1, autocast=True),
        tiny(batch=16, seq_len=32, clip=None, optimizer="sgd"),
        tiny(checkpoint=True, accumulate=2),
    ],
    ids=lambda case: "-".join(map(str, case.describe().values())),
)
def test_the_loss_falls(case: TrainStep) -> None:
    assert check(case) is None


class Idle(torch.optim.SGD):
    """An optimizer that forgets to move the parameters."""

    def step(self, closure: Any = None) -> Any:
        pass


class Blind(torch.optim.AdamW):
    """An optimizer that sees no gradients; its weight decay still moves the parameters."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.zero_()
        return super().step(closure)


class Backwards(torch.optim.SGD):
    """An optimizer that goes uphill."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.neg_()
        return super().step(closure)


class Broken(torch.optim.SGD):
    """An optimizer that makes NaN of everything."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.fill_(float("nan"))


@pytest.mark.parametrize("optimizer", [Idle, Blind, Backwards, Broken])
def test_a_loss_that_does_not_fall_is_told(monkeypatch: pytest.MonkeyPatch, optimizer: Callable[..., Any]) -> None:
    monkeypatch.setattr(train_step, "optimizer_for", lambda name, parameters, width: optimizer(parameters, lr=0.01))
    reason = check(tiny())
    assert reason is not None
    assert reason.startswith("the loss did not fall over 10 steps of a fixed batch: 6.")
    assert "\n" not in reason


def test_a_model_that_compiling_has_changed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by(factor: float) -> Callable[..., Any]:
        return lambda function, device: lambda tokens: factor * function(tokens)

    monkeypatch.setattr(train_step, "compiled", off_by(1.01))
    reason = check(tiny(execution="compile"))
    assert reason is not None
    assert reason.startswith("the compiled model's loss is 6.")
    monkeypatch.setattr(train_step, "compiled", off_by(1.0 + 1e-6))
    assert check(tiny(execution="compile")) is None


def test_each_step_learns_from_new_tokens() -> None:
    built = training(tiny())
    seen = []
    for _ in range(3):
        built.step_on_new_tokens()
        seen.append(built.tokens.clone())
    assert len({tuple(tokens.flatten().tolist()) for tokens in seen}) == 3
    assert int(torch.stack(seen).max()) >= 512 // 2  # from the whole vocabulary


def test_micro_batches_are_averaged() -> None:
    batch = torch.randint(512, (2, 17), generator=torch.Generator().manual_seed(3))
    models = []
    for count in (1, 2):
        built = training(tiny(accumulate=count, optimizer="sgd"))
        loss = built.step(lambda: batch)
        models.append([loss, *built.model.parameters()])
    torch.testing.assert_close(models[1], models[0])


def test_gradients_are_clipped_to_their_norm() -> None:
    moved = {}
    for clip in (1.0, 0.5, None):
        built = training(tiny(optimizer="sgd", clip=clip))
        before = parameters_to_vector(built.model.parameters()).detach()
        built.step_on_new_tokens()
        moved[clip] = float((parameters_to_vector(built.model.parameters()).detach() - before).norm())
    # The rate is 0.1 and the gradient's norm above 1.
    assert moved[1.0] == pytest.approx(0.1, rel=1e-3)
    assert moved[0.5] == pytest.approx(0.05, rel=1e-3)
    assert moved[None] > 0.1


def test_autocast_keeps_parameters_wide() -> None:
    built = training(tiny(dtype="bf16", autocast=True))
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.float32}
    loss = built.loss_of(built.tokens).detach()
    exact = training(tiny()).loss_of(built.tokens).detach()
    assert loss.dtype == torch.float32
    assert 0 < abs(float(loss) - float(exact)) < 0.05
    assert {parameter.dtype for parameter in training(tiny(dtype="bf16")).model.parameters()} == {torch.bfloat16}


def test_the_rate_falls_with_the_width() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    rates = [optimizer_for("adamw", [parameter], width=width).param_groups[0]["lr"] for width in (128, 768, 12288)]
    assert rates == pytest.approx([1e-3, 0.2 / 768, 0.2 / 12288])
    assert optimizer_for("adamw_fused", [parameter], width=128).param_groups[0]["fused"]
    assert not optimizer_for("adamw", [parameter], width=128).param_groups[0]["fused"]


def test_resident_bytes_are_parameters_state_and_tokens() -> None:
    built = tiny().build("cpu")
    assert built.resident_bytes is not None
    parameters = 4 * MODELS["tiny-gpt"].parameters()
    assert built.resident_bytes() == parameters + 2 * 17 * 8
    built.step()
    counters = 4 * len(list(training(tiny()).model.parameters()))
    assert built.resident_bytes() == 3 * parameters + counters + 2 * 17 * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt5"}, "model='gpt5' is not known; use one of gpt2-124m"),
        ({"batch": 0}, "TrainStep: batch=0 must be a whole number of at least 1"),
        ({"seq_len": 257}, "TrainStep: seq_len=257 must not exceed the 256 positions of tiny-gpt"),
        ({"accumulate": 1.0}, "TrainStep: accumulate=1.0 must be a whole number"),
        ({"checkpoint": 1}, "TrainStep: checkpoint=1 must be True or False"),
        ({"optimizer": "adam"}, "TrainStep: optimizer='adam' must be one of adamw, adamw_fused, sgd"),
        ({"execution": "graph"}, "TrainStep: execution='graph' must be one of eager, compile"),
        (
            {"dtype": "fp16", "autocast": True},
            r"dtype='fp16' must be one of fp32, tf32, bf16 \(fp16 needs its loss scaled",
        ),
        ({"dtype": "int8"}, "TrainStep: dtype='int8' must be one of fp32, tf32, bf16$"),
        ({"autocast": True}, "TrainStep: dtype='fp32' must be 'bf16' with autocast=True"),
        ({"optimizer": ["sgd"]}, r"TrainStep: optimizer=\['sgd'\] must be one of adamw, adamw_fused, sgd"),
        ({"clip": 0}, "TrainStep: clip=0 must be a finite number above 0, or None"),
        ({"clip": True}, "TrainStep: clip=True must be a finite number above 0, or None"),
        ({"clip": float("inf")}, "TrainStep: clip=inf must be a finite number above 0, or None"),
        ({"clip": float("nan")}, "TrainStep: clip=nan must be a finite number above 0, or None"),
        ({"input": 0.02}, "TrainStep: input=0.02 must be an InputPipeline, or None"),
        ({"layers": 0}, "layers=0 must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        tiny(**changes)


def test_what_a_target_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny().unsupported(CPU) is None
    assert tiny(dtype="tf32").unsupported(CPU) == "no TF32"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in (tiny(execution="compile").unsupported(CPU) or "")
    assert tiny(execution="compile").launch() == "compile"
    assert tiny().cpu_control() == "mixed"


def test_the_pipeline_is_in_the_description() -> None:
    description = tiny(input=InputPipeline(batch_s=0.02, workers=3)).describe()
    assert (description["input_batch_s"], description["input_workers"]) == (0.02, 3)
    assert not {name for name in tiny().describe() if name.startswith("input")}


def test_what_waits_for_input_is_wired() -> None:
    built = tiny(input=InputPipeline(batch_s=0.0)).build("cpu")
    assert isinstance(built, Prepared)
    assert built.before_block is None  # a loader in the step's own process does not get ahead
    assert built.reset is not None
    assert built.shares is not None
    assert built.close is not None
    built.step()
    assert 0 < built.shares()["input_wait"] < 1
    built.reset()
    assert built.shares() == {}
    built.close()
