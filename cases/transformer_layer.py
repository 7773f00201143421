"""One layer of published models, forward and backward, by each way to run it; and a linear layer with its GELU."""

import pytest

from perfsuite import LinearGelu, TransformerLayer

# (model, sequences, tokens of each, dtype, execution). The first of each list suit a CPU, whose bf16 may be slow.
FORWARD = [
    ("gpt2-124m", 1, 96, "fp32", "eager"),
    ("gpt2-124m", 1, 8, "bf16", "eager"),
    ("tiny-llama", 2, 128, "fp32", "eager"),
    ("tiny-llama", 1, 64, "bf16", "compile"),
    ("gpt2-124m", 16, 1024, "bf16", "eager"),
    ("gpt3-175b", 1, 2048, "bf16", "eager"),
    ("llama2-7b", 1, 4096, "bf16", "eager"),
    ("llama2-7b", 1, 4096, "fp32", "eager"),
    ("llama2-7b", 1, 4096, "tf32", "eager"),
    ("llama3-8b", 1, 8192, "bf16", "eager"),
    ("llama3-8b", 1, 8192, "bf16", "compile"),
    ("llama3-8b", 1, 8192, "bf16", "graph"),
    ("llama3-8b", 1, 8192, "fp16", "eager"),
    ("llama3-70b", 1, 8192, "bf16", "eager"),
]
BACKWARD = [
    ("gpt2-124m", 1, 96, "fp32", "eager"),
    ("tiny-gpt", 4, 64, "fp32", "eager"),
    ("tiny-gpt", 4, 64, "fp32", "compile"),
    ("tiny-gpt", 1, 64, "bf16", "eager"),
    ("gpt2-124m", 16, 1024, "bf16", "eager"),
    ("gpt2-124m", 16, 1024, "bf16", "compile"),
    ("gpt2-124m", 16, 1024, "bf16", "graph"),
    ("gpt3-175b", 1, 2048, "bf16", "eager"),
    ("llama2-7b", 1, 4096, "bf16", "eager"),
    ("llama2-7b", 1, 4096, "tf32", "eager"),
    ("llama3-8b", 1, 8192, "bf16", "eager"),
    ("llama3-8b", 1, 8192, "bf16", "compile"),
    ("llama3-8b", 1, 8192, "fp16", "eager"),
    ("llama3-70b", 1, 8192, "bf16", "eager"),
    ("llama3-70b", 1, 8192, "bf16", "compile"),
]
# Twins of the eager ones above, with every activation computed a second time.
CHECKPOINT = [
    ("gpt2-124m", 1, 96, "fp32", "eager"),
    ("llama3-8b", 1, 8192, "bf16", "eager"),
    ("llama3-8b", 1, 8192, "bf16", "compile"),
]
SMOKE = {FORWARD[0], FORWARD[9]}  # both are in BACKWARD too
MARKS = {row: [pytest.mark.smoke] for row in SMOKE} | {FORWARD[1]: [pytest.mark.perf(budget_s=2)]}

LAYERS = {
    rows: [
        pytest.param(*row, marks=MARKS.get(row, []) if rows != "checkpoint" else [], id="{}.b{}-t{}-{}-{}".format(*row))
        for row in listed
    ]
    for rows, listed in {"forward": FORWARD, "backward": BACKWARD, "checkpoint": CHECKPOINT}.items()
}

# (model, tokens, dtype, routing, capacity factor): where the slowest expert decides, and where it may drop tokens.
MIXTURES = {
    "tiny-moe.t128-fp32-balanced": ("tiny-moe", 128, "fp32", "balanced", None),
    "tiny-moe.t128-fp32-skewed": ("tiny-moe", 128, "fp32", "skewed", None),
    "tiny-moe.t128-fp32-skewed-capacity1": ("tiny-moe", 128, "fp32", "skewed", 1.0),
    "mixtral-8x7b.t4096-bf16-balanced": ("mixtral-8x7b", 4096, "bf16", "balanced", None),
    "mixtral-8x7b.t4096-bf16-skewed": ("mixtral-8x7b", 4096, "bf16", "skewed", None),
    "mixtral-8x7b.t4096-bf16-skewed-capacity1.25": ("mixtral-8x7b", 4096, "bf16", "skewed", 1.25),
}

# (tokens, d_in, d_out, dtype): the way up of each model's MLP.
GELUS = {
    "gpt2-124m.t128-fp32": (128, 768, 3072, "fp32"),
    "gpt2-124m.t16384-bf16": (16384, 768, 3072, "bf16"),
    "gpt3-175b.t2048-bf16": (2048, 12288, 49152, "bf16"),
}


@pytest.mark.parametrize(("model", "batch", "seq_len", "dtype", "execution"), LAYERS["forward"])
def bench_forward(model, batch, seq_len, dtype, execution):
    return TransformerLayer(model=model, batch=batch, seq_len=seq_len, dtype=dtype, execution=execution)


@pytest.mark.parametrize(("model", "batch", "seq_len", "dtype", "execution"), LAYERS["backward"])
def bench_backward(model, batch, seq_len, dtype, execution):
    return TransformerLayer(model=model, batch=batch, seq_len=seq_len, dtype=dtype, execution=execution, backward=True)


@pytest.mark.parametrize(("model", "batch", "seq_len", "dtype", "execution"), LAYERS["checkpoint"])
def bench_checkpoint(model, batch, seq_len, dtype, execution):
    sizes = {"batch": batch, "seq_len": seq_len}
    return TransformerLayer(model=model, **sizes, dtype=dtype, execution=execution, backward=True, checkpoint=True)


@pytest.mark.parametrize("attention", ["math", "efficient", "flash", "cudnn"])
def bench_attention(attention):
    return TransformerLayer(model="llama2-7b", batch=1, seq_len=4096, dtype="bf16", backward=True, attention=attention)


@pytest.mark.parametrize(("model", "seq_len", "dtype", "routing", "capacity_factor"), MIXTURES.values(), ids=MIXTURES)
def bench_mixture(model, seq_len, dtype, routing, capacity_factor):
    routed = {"routing": routing, "capacity_factor": capacity_factor}
    return TransformerLayer(model=model, batch=1, seq_len=seq_len, dtype=dtype, backward=True, **routed)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(("tokens", "d_in", "d_out", "dtype"), GELUS.values(), ids=GELUS)
def bench_linear_gelu(tokens, d_in, d_out, dtype, fused):
    return LinearGelu(tokens=tokens, d_in=d_in, d_out=d_out, dtype=dtype, fused=fused)
