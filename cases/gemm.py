"""Matrix multiplication at the sizes of published models, of DeepBench, and at squares that reach a device's peak."""

import pytest

from perfsuite import Gemm

# (m, n, k): m is tokens, n and k a layer's output and input features.
# GPT-2 124M: width 768, MLP 3072 (Radford et al. 2019); a quarter of its context of 1024.
GPT2 = {
    "gpt2-124m.qkv": (256, 2304, 768),
    "gpt2-124m.proj": (256, 768, 768),
    "gpt2-124m.mlp-up": (256, 3072, 768),
    "gpt2-124m.mlp-down": (256, 768, 3072),
}

# Widths and MLPs: GPT-3 12288 and 49152 (arXiv:2005.14165); Llama-2-7B 4096 and 11008 (arXiv:2307.09288); Llama-3-8B
# 4096 and 14336, -70B 8192 and 28672, both with 8 heads of 128 for keys and for values (arXiv:2407.21783).
LANGUAGE_MODELS = {
    "gpt3-175b.mlp-up": (2048, 49152, 12288),
    "llama2-7b.mlp-up": (8192, 11008, 4096),
    "llama3-8b.qkv": (8192, 6144, 4096),
    "llama3-8b.mlp-down": (8192, 4096, 14336),
    "llama3-70b.qkv": (8192, 10240, 8192),
    "llama3-70b.mlp-up": (8192, 28672, 8192),
}

# The same layers while generating: one token for each of 32 sequences, so that reading the weight is the work.
DECODE = {
    "llama3-8b.qkv": (32, 6144, 4096),
    "llama3-8b.mlp-down": (32, 4096, 14336),
}

# github.com/baidu-research/DeepBench, code/kernels/gemm_problems.h: training and inference on servers.
DEEPBENCH = (
    (1760, 16, 1760),
    (1760, 128, 1760),
    (2560, 64, 2560),
    (3072, 128, 1024),
    (1024, 700, 512),
    (35, 700, 2048),
    (5124, 9124, 2560),
    (7680, 1, 2560),
)

# (batch, m, n, k, dtype): scores and values of GPT-2's 12 heads of 64 over 512 tokens, and of Llama-3-8B's 32 heads of
# 128 over 4096 tokens of 4 sequences, as attention without a fused kernel has them.
HEADS = {
    "gpt2-124m.scores-fp32": (12, 512, 512, 64, "fp32"),
    "gpt2-124m.scores-bf16": (12, 512, 512, 64, "bf16"),
    "gpt2-124m.values-fp32": (12, 512, 64, 512, "fp32"),
    "gpt2-124m.values-bf16": (12, 512, 64, 512, "bf16"),
    "llama3-8b.scores-bf16": (128, 4096, 4096, 128, "bf16"),
    "llama3-8b.values-bf16": (128, 4096, 128, 4096, "bf16"),
}

LAYOUTS = {"nt": (False, True), "tn": (True, False)}
SMOKE = {(1024, "fp32"), (1024, "bf16"), (8192, "bf16")}
SQUARES = [
    pytest.param(size, dtype, marks=[pytest.mark.smoke] * ((size, dtype) in SMOKE), id=f"{size}-{dtype}")
    for size in (1024, 8192)
    for dtype in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")
]


@pytest.mark.parametrize(("size", "dtype"), SQUARES)
def bench_square(size, dtype):
    return Gemm(m=size, n=size, k=size, dtype=dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("m", "n", "k"), GPT2.values(), ids=GPT2)
def bench_linear(m, n, k, dtype):
    return Gemm(m=m, n=n, k=k, dtype=dtype, transpose_b=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp8"])
@pytest.mark.parametrize(("m", "n", "k"), LANGUAGE_MODELS.values(), ids=LANGUAGE_MODELS)
def bench_layer(m, n, k, dtype):
    return Gemm(m=m, n=n, k=k, dtype=dtype)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize(("m", "n", "k"), DECODE.values(), ids=DECODE)
def bench_decode(m, n, k, dtype):
    return Gemm(m=m, n=n, k=k, dtype=dtype)


@pytest.mark.parametrize(("m", "n", "k"), DEEPBENCH, ids=["-".join(map(str, shape)) for shape in DEEPBENCH])
def bench_deepbench(m, n, k):
    return Gemm(m=m, n=n, k=k, dtype="fp32")


@pytest.mark.parametrize(("size", "dtype"), [(1024, "fp32"), (8192, "bf16")], ids=["1024-fp32", "8192-bf16"])
@pytest.mark.parametrize(("transpose_a", "transpose_b"), LAYOUTS.values(), ids=LAYOUTS)
def bench_layout(size, dtype, transpose_a, transpose_b):
    return Gemm(m=size, n=size, k=size, dtype=dtype, transpose_a=transpose_a, transpose_b=transpose_b)


@pytest.mark.parametrize(("batch", "m", "n", "k", "dtype"), HEADS.values(), ids=HEADS)
def bench_batched(batch, m, n, k, dtype):
    return Gemm(batch=batch, m=m, n=n, k=k, dtype=dtype)
