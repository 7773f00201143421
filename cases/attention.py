"""Attention by each of torch's kernels: forward and backward, masked and not, with grouped heads, long contexts."""

import dataclasses

import pytest

from perfsuite import Attention

# (heads, heads of keys and of values, their size): GPT-2 124M (Radford et al. 2019), Llama-2-7B (arXiv:2307.09288),
# Llama-3-8B (arXiv:2407.21783), and perfsuite's tiny-gpt.
HEADS = {
    "tiny-gpt": (4, 4, 32),
    "gpt2-124m": (12, 12, 64),
    "llama2-7b": (32, 32, 128),
    "llama3-8b": (32, 8, 128),
}

# (model, tokens, dtype, mask, backend). The small ones suit a CPU, where bf16 is slow; 16384 tokens with a causal mask
# are where counting every pair of tokens reads as more than the peak.
FORWARD = [
    ("gpt2-124m", 512, "fp32", "full", "flash"),
    ("gpt2-124m", 512, "fp32", "causal", "auto"),
    ("gpt2-124m", 512, "fp32", "causal", "math"),
    ("gpt2-124m", 512, "fp32", "causal", "flex"),
    ("gpt2-124m", 1024, "fp32", "causal", "flash"),
    ("gpt2-124m", 128, "bf16", "causal", "flash"),
    ("gpt2-124m", 512, "bf16", "causal", "math"),
    ("llama3-8b", 256, "fp32", "causal", "flash"),
    ("llama2-7b", 4096, "bf16", "causal", "math"),
    ("llama2-7b", 4096, "bf16", "causal", "efficient"),
    ("llama2-7b", 4096, "bf16", "causal", "flash"),
    ("llama3-8b", 8192, "bf16", "causal", "auto"),
    ("llama3-8b", 8192, "bf16", "causal", "flash"),
    ("llama3-8b", 8192, "bf16", "causal", "cudnn"),
    ("llama3-8b", 8192, "bf16", "causal", "flex"),
    ("llama3-8b", 8192, "fp16", "causal", "flash"),
    ("llama3-8b", 8192, "bf16", "full", "flash"),
    ("llama3-8b", 16384, "bf16", "causal", "flash"),
]
BACKWARD = [
    ("tiny-gpt", 128, "bf16", "causal", "flash"),
    ("gpt2-124m", 256, "fp32", "causal", "math"),
    ("gpt2-124m", 512, "fp32", "causal", "flash"),
    ("llama2-7b", 4096, "bf16", "causal", "efficient"),
    ("llama3-8b", 8192, "bf16", "causal", "flash"),
    ("llama3-8b", 8192, "bf16", "causal", "cudnn"),
    ("llama3-8b", 8192, "bf16", "causal", "flex"),
    ("llama3-8b", 8192, "bf16", "full", "flash"),
    ("llama3-8b", 16384, "bf16", "causal", "flash"),
]
SMOKE = {FORWARD[4], FORWARD[12], BACKWARD[2]}

# (model, new tokens, tokens in all, dtype): a prompt taken in by chunks, of which this is the last.
CHUNKS = {
    "gpt2-124m.t128-of-1024-fp32": ("gpt2-124m", 128, 1024, "fp32"),
    "llama3-8b.t512-of-8192-bf16": ("llama3-8b", 512, 8192, "bf16"),
}


ONE_WAY, BOTH_WAYS = (
    [pytest.param(*row, marks=[pytest.mark.smoke] * (row in SMOKE), id="{}.t{}-{}-{}-{}".format(*row)) for row in rows]
    for rows in (FORWARD, BACKWARD)
)


@pytest.mark.parametrize(("model", "tokens", "dtype", "mask", "backend"), ONE_WAY)
def bench_forward(model, tokens, dtype, mask, backend):
    heads, kv, size = HEADS[model]
    causal = mask == "causal"
    return Attention(heads=heads, kv_heads=kv, head_dim=size, q_len=tokens, causal=causal, backend=backend, dtype=dtype)


@pytest.mark.parametrize(("model", "tokens", "dtype", "mask", "backend"), BOTH_WAYS)
def bench_backward(model, tokens, dtype, mask, backend):
    return dataclasses.replace(bench_forward(model, tokens, dtype, mask, backend), backward=True)


@pytest.mark.parametrize(("model", "tokens", "context", "dtype"), CHUNKS.values(), ids=CHUNKS)
def bench_chunk(model, tokens, context, dtype):
    heads, kv, size = HEADS[model]
    return Attention(
        heads=heads, kv_heads=kv, head_dim=size, q_len=tokens, kv_len=context, backend="flash", dtype=dtype
    )
