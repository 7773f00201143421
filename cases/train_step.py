"""Whole training steps of published models: optimizers, precision, recomputation, batches, input and several ranks."""

from typing import Any

import pytest

from perfsuite import InputPipeline, Parallel, TrainStep

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

# By several ranks: (a layout, what else the step has). Ranks that are left over when tensor x pipeline of them share a
# model are data parallel. Tiny models have so few parameters that DDP's usual 25 MiB are one bucket.
TINY_PARALLEL: dict[str, tuple[Options, Options]] = {
    "ddp": ({"data": "ddp"}, {}),
    "ddp-bucket-0.5mib": ({"data": "ddp", "bucket_mib": 0.5}, {}),
    "ddp-sync-every-1": ({"data": "ddp", "sync_every": 1}, {"accumulate": 4}),
    "ddp-sync-every-4": ({"data": "ddp", "sync_every": 4}, {"accumulate": 4}),
    "fsdp2": ({"data": "fsdp2"}, {}),
    "tensor-2": ({"data": "ddp", "tensor": 2}, {}),
    "fsdp2-tensor-2": ({"data": "fsdp2", "tensor": 2}, {}),
    "pipeline-2-gpipe": ({"data": "ddp", "pipeline": 2, "schedule": "gpipe", "microbatches": 4}, {}),
    "pipeline-2-1f1b": ({"data": "ddp", "pipeline": 2, "schedule": "1f1b", "microbatches": 4}, {}),
}
GPT2_PARALLEL: dict[str, tuple[Options, Options]] = {
    "ddp": ({"data": "ddp"}, {}),
    "ddp-bucket-5mib": ({"data": "ddp", "bucket_mib": 5}, {}),
    "ddp-sync-every-4": ({"data": "ddp", "sync_every": 4}, {"accumulate": 4}),
    "fsdp2": ({"data": "fsdp2"}, {}),
}
# Eight layers have 10.5 GB of parameters in fp32; all 32 fit eight GPUs of 80 GB with FSDP2, and no one of them.
LLAMA3_PARALLEL: dict[str, tuple[Options, Options]] = {
    "l8-fsdp2": ({"data": "fsdp2"}, {"layers": 8}),
    "l8-tensor-2": ({"data": "ddp", "tensor": 2}, {"layers": 8}),
    "l8-fsdp2-tensor-2": ({"data": "fsdp2", "tensor": 2}, {"layers": 8}),
    "l8-pipeline-2": ({"data": "ddp", "pipeline": 2, "microbatches": 8}, {"layers": 8, "batch": 8}),
    "l32-fsdp2": ({"data": "fsdp2"}, {}),
}

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


def shared(ranks: int, layout: Options) -> Parallel:
    """The layout on this many ranks, or a skip where they cannot be divided so."""
    each = layout.get("tensor", 1) * layout.get("pipeline", 1)
    least = max(2, 2 * each if layout["data"] == "fsdp2" else each)
    if ranks < least or ranks % each:
        multiple = f" in multiples of {each}" if each > 1 else ""
        pytest.skip(f"needs {least} ranks or more{multiple}, here is {ranks}: --perf-ranks {least}")
    return Parallel(ranks=ranks, **layout)


@pytest.mark.perf(ranks="all")
@pytest.mark.parametrize(("layout", "options"), TINY_PARALLEL.values(), ids=TINY_PARALLEL)
def bench_tiny_parallel(layout, options, ranks):
    return TrainStep(model="tiny-llama", batch=4, seq_len=128, parallel=shared(ranks, layout), **options)


@pytest.mark.perf(ranks="all")
@pytest.mark.parametrize(("layout", "options"), GPT2_PARALLEL.values(), ids=GPT2_PARALLEL)
def bench_gpt2_124m_parallel(layout, options, ranks):
    sizes: Options = {"model": "gpt2-124m", "batch": 8, "seq_len": 1024, "optimizer": "adamw_fused"}
    return TrainStep(parallel=shared(ranks, layout), **sizes, **MIXED, **options)


@pytest.mark.perf(ranks="all")
@pytest.mark.parametrize(("layout", "options"), LLAMA3_PARALLEL.values(), ids=LLAMA3_PARALLEL)
def bench_llama3_8b_parallel(layout, options, ranks):
    sizes: Options = {"model": "llama3-8b", "batch": 1, "seq_len": 8192, "optimizer": "adamw_fused", "checkpoint": True}
    return TrainStep(parallel=shared(ranks, layout), **{**sizes, **MIXED, **options})
