"""Whole training steps of published models: optimizers, precision, recomputation, accumulation, batches and input."""

from typing import Any

import pytest

from perfsuite import InputPipeline, TrainStep

Options = dict[str, Any]

# For GPUs. Parameters and optimizer state in fp32 as nearly everyone trains, matmuls in bf16.
MIXED: Options = {"dtype": "bf16", "autocast": True}

# GPT-2 124M with its whole context of 1024 (Radford et al. 2019).
GPT2: dict[str, Options] = {
    "adamw": {},
    "adamw-fused": {"optimizer": "adamw_fused"},
    "adamw-fused-compile": {"optimizer": "adamw_fused", "execution": "compile"},
    "adamw-fused-checkpoint": {"optimizer": "adamw_fused", "checkpoint": True},
    "adamw-fused-accumulate-4": {"optimizer": "adamw_fused", "accumulate": 4},
    "adamw-fused-input-20ms": {"optimizer": "adamw_fused", "input": InputPipeline(batch_s=0.020, workers=1)},
}

# (model, layers, micro-batch, tokens of a sequence): contexts as published, 4096 for Llama-2 and Mixtral, 8192 for
# Llama-3, 2048 for GPT-3. Sixteen bytes a parameter: the whole models need more than one GPU has.
LARGE = [
    ("llama2-7b", 32, 1, 4096),
    ("llama3-8b", 32, 1, 8192),
    ("llama3-8b", 4, 1, 8192),
    ("llama3-70b", 1, 1, 8192),
    ("gpt3-175b", 1, 1, 2048),
    ("mixtral-8x7b", 1, 1, 4096),
]

# For CPUs: models of no publication, some tens of milliseconds a step on one core. Many CPUs multiply bf16 far more
# slowly than fp32, hence one sequence of 32 tokens there.
TINY: dict[str, Options] = {
    "tiny-gpt-adamw": {"model": "tiny-gpt"},
    "tiny-gpt-adamw-fused": {"model": "tiny-gpt", "optimizer": "adamw_fused"},
    "tiny-gpt-sgd": {"model": "tiny-gpt", "optimizer": "sgd"},
    "tiny-gpt-adamw-compile": {"model": "tiny-gpt", "execution": "compile"},
    "tiny-gpt-adamw-accumulate-4": {"model": "tiny-gpt", "accumulate": 4},
    "tiny-llama-adamw": {"model": "tiny-llama"},
    "tiny-llama-adamw-checkpoint": {"model": "tiny-llama", "checkpoint": True},
    "tiny-moe-adamw": {"model": "tiny-moe"},
}
NARROW: dict[str, Options] = {"bf16": {"dtype": "bf16"}, "autocast": MIXED}
INPUT = {"in-step": 0, "1-worker": 1}

SMOKE = {"adamw-fused", "tiny-gpt-adamw", "tiny-llama-adamw"}


def named(options: dict[str, Options]):
    return [pytest.param(each, marks=[pytest.mark.smoke] * (name in SMOKE), id=name) for name, each in options.items()]


@pytest.mark.parametrize("options", named(GPT2))
def bench_gpt2_124m(options):
    return TrainStep(model="gpt2-124m", batch=8, seq_len=1024, **MIXED, **options)


@pytest.mark.parametrize(
    ("model", "layers", "batch", "seq_len"), LARGE, ids=["{}.l{}-b{}-t{}".format(*each) for each in LARGE]
)
def bench_large(model, layers, batch, seq_len):
    sizes = {"model": model, "layers": layers, "batch": batch, "seq_len": seq_len}
    return TrainStep(optimizer="adamw_fused", checkpoint=True, **sizes, **MIXED)


@pytest.mark.perf(sweep="batch")
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 32, 64])
def bench_batch_sweep(batch):
    return TrainStep(model="gpt2-124m", batch=batch, seq_len=1024, optimizer="adamw_fused", **MIXED)


@pytest.mark.parametrize("options", named(TINY))
def bench_tiny(options):
    return TrainStep(batch=4, seq_len=128, **options)


@pytest.mark.parametrize("options", named(NARROW))
def bench_tiny_narrow(options):
    return TrainStep(model="tiny-gpt", batch=1, seq_len=32, **options)


@pytest.mark.parametrize("workers", INPUT.values(), ids=INPUT)
def bench_tiny_input_20ms(workers):
    return TrainStep(model="tiny-gpt", batch=1, seq_len=32, input=InputPipeline(batch_s=0.020, workers=workers))


@pytest.mark.perf(sweep="batch")
@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
def bench_tiny_batch_sweep(batch):
    return TrainStep(model="tiny-llama", batch=batch, seq_len=64)


@pytest.mark.perf(budget_s=5)
def bench_gpt2_124m_short():
    return TrainStep(model="gpt2-124m", layers=2, batch=1, seq_len=32)
