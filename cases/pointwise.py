"""Normalisation, activations and other element-wise work of language models: one pass over memory each, at best."""

import pytest

from perfsuite import Dropout, Gelu, LayerNorm, ResidualAdd, RMSNorm, SiluMul, Softmax

# (rows, cols): rows are tokens. For CPUs about 50 MB each: what fits a cache runs at the mercy of the neighbours in it.
# GPT-2 124M is 768 wide, its MLP 3072, its context 1024 with 12 heads (Radford et al. 2019).
GPT2 = (16 * 1024, 768)
GPT2_MLP = (4 * 1024, 3072)
GPT2_SCORES = (12 * 1024, 1024)

# Llama-3-8B is 4096 wide, its MLP 14336; Llama-3-70B is 8192 wide (arXiv:2407.21783).
LLAMA3_8B = (4096, 4096)
LLAMA3_8B_MLP = (1024, 14336)

# For GPUs: sequences of 8192 tokens, gigabytes each, and under 2**31 elements, beyond which kernels index differently.
LLAMA3_70B_LARGE = (24 * 8192, 8192)
LLAMA3_8B_MLP_LARGE = (12 * 8192, 14336)
SCORES_LARGE = (24 * 8192, 8192)

LARGE = [
    pytest.param(LayerNorm, LLAMA3_70B_LARGE, id="layer-norm"),
    pytest.param(RMSNorm, LLAMA3_70B_LARGE, id="rms-norm"),
    pytest.param(Softmax, SCORES_LARGE, id="softmax"),
    pytest.param(Gelu, LLAMA3_8B_MLP_LARGE, id="gelu"),
    pytest.param(SiluMul, LLAMA3_8B_MLP_LARGE, id="silu-mul"),
    pytest.param(Dropout, LLAMA3_8B_MLP_LARGE, id="dropout"),
    pytest.param(ResidualAdd, LLAMA3_8B_MLP_LARGE, id="residual-add"),
]
FORMS = pytest.mark.parametrize(
    ("dtype", "fused"),
    [
        pytest.param("fp32", True, marks=pytest.mark.smoke, id="fp32-fused"),
        pytest.param("fp32", False, id="fp32-unfused"),
        pytest.param("bf16", True, id="bf16-fused"),
    ],
)
FP32_AND_BF16 = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


@pytest.mark.parametrize(("workload", "shape"), LARGE)
def bench_large(workload, shape):
    return workload(rows=shape[0], cols=shape[1], dtype="bf16")


@FORMS
def bench_layer_norm(dtype, fused):
    return LayerNorm(rows=GPT2[0], cols=GPT2[1], dtype=dtype, fused=fused)


@FORMS
def bench_rms_norm(dtype, fused):
    return RMSNorm(rows=LLAMA3_8B[0], cols=LLAMA3_8B[1], dtype=dtype, fused=fused)


@FORMS
def bench_softmax(dtype, fused):
    return Softmax(rows=GPT2_SCORES[0], cols=GPT2_SCORES[1], dtype=dtype, fused=fused)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def bench_gelu(approximate, fused):
    return Gelu(rows=GPT2_MLP[0], cols=GPT2_MLP[1], approximate=approximate, dtype="fp32", fused=fused)


@FP32_AND_BF16
def bench_silu_mul(dtype):
    return SiluMul(rows=LLAMA3_8B_MLP[0], cols=LLAMA3_8B_MLP[1], dtype=dtype)


def bench_dropout():
    return Dropout(rows=GPT2[0] // 2, cols=GPT2[1], p=0.1, dtype="fp32")


@FP32_AND_BF16
def bench_residual_add(dtype):
    return ResidualAdd(rows=LLAMA3_8B[0], cols=LLAMA3_8B[1], dtype=dtype)
