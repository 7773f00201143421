"""Generating text: prompts of several lengths, single tokens behind long contexts, and quantized weights."""

import pytest

from perfsuite import Decode, Gemm, Prefill, QuantizedGemv

# (model, layers, sequences, tokens of each prompt, dtype, execution). The first ones suit a CPU.
PREFILL = [
    ("tiny-llama", 2, 4, 128, "fp32", "eager"),
    ("tiny-gpt", 2, 1, 64, "bf16", "eager"),
    ("gpt2-124m", 4, 1, 64, "fp32", "eager"),
    ("gpt2-124m", 12, 16, 512, "bf16", "eager"),
    ("llama3-8b", 32, 1, 512, "bf16", "eager"),
    ("llama3-8b", 32, 1, 2048, "bf16", "eager"),
    ("llama3-8b", 32, 1, 2048, "bf16", "compile"),
    ("llama3-8b", 32, 4, 2048, "bf16", "eager"),
    ("llama3-70b", 1, 1, 2048, "bf16", "eager"),
    ("mixtral-8x7b", 1, 1, 2048, "bf16", "eager"),
]
# (model, layers, sequences, positions in the cache, dtype, execution). GPT-2 has 1024 positions, one of them the new.
DECODE = [
    ("tiny-llama", 2, 8, 128, "bf16", "eager"),
    ("tiny-moe", 2, 1, 128, "fp32", "eager"),
    ("gpt2-124m", 12, 1, 128, "fp32", "eager"),
    ("gpt2-124m", 12, 1, 1023, "fp32", "eager"),
    ("gpt2-124m", 12, 32, 1023, "bf16", "graph"),
    ("llama2-7b", 32, 8, 2048, "bf16", "eager"),
    ("llama3-8b", 32, 1, 8192, "bf16", "eager"),
    ("llama3-8b", 32, 1, 8192, "bf16", "compile"),
    ("llama3-8b", 32, 1, 8192, "bf16", "graph"),
    ("llama3-8b", 32, 32, 8192, "bf16", "graph"),
    ("llama3-70b", 1, 8, 8192, "bf16", "graph"),
    ("mixtral-8x7b", 8, 1, 8192, "bf16", "graph"),
    ("mixtral-8x7b", 8, 8, 8192, "bf16", "graph"),
]
MARKS = {row: [pytest.mark.smoke] for row in (PREFILL[0], PREFILL[5], DECODE[2], DECODE[8])}

PROMPTS = [pytest.param(*row, marks=MARKS.get(row, []), id="{}.l{}-b{}-t{}-{}-{}".format(*row)) for row in PREFILL]
TOKENS = [pytest.param(*row, marks=MARKS.get(row, []), id="{}.l{}-b{}-c{}-{}-{}".format(*row)) for row in DECODE]

# (outputs, inputs) of the way up of each MLP, Llama's gate with it: what is read for every token.
WEIGHTS = {
    "gpt2-124m.mlp-up": (3072, 768),
    "llama3-8b.mlp-up": (28672, 4096),
    "llama3-70b.mlp-up": (57344, 8192),
}
FORMATS = {"int8": (8, None), "int4-g128": (4, 128)}


@pytest.mark.parametrize(("model", "layers", "batch", "seq_len", "dtype", "execution"), PROMPTS)
def bench_prefill(model, layers, batch, seq_len, dtype, execution):
    return Prefill(model=model, layers=layers, batch=batch, seq_len=seq_len, dtype=dtype, execution=execution)


@pytest.mark.parametrize(("model", "layers", "batch", "context", "dtype", "execution"), TOKENS)
def bench_decode(model, layers, batch, context, dtype, execution):
    return Decode(model=model, layers=layers, batch=batch, context=context, dtype=dtype, execution=execution)


@pytest.mark.perf(sweep="batch")
@pytest.mark.parametrize("batch", [1, 8, 32, 128])
def bench_decode_batch(batch):
    return Decode(model="llama3-8b", batch=batch, context=1024, dtype="bf16", execution="graph")


@pytest.mark.parametrize(("bits", "group"), FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("n", "k"), WEIGHTS.values(), ids=WEIGHTS)
def bench_quantized(n, k, bits, group):
    return QuantizedGemv(n=n, k=k, bits=bits, group=group, dtype="bf16")


@pytest.mark.parametrize(("n", "k"), WEIGHTS.values(), ids=WEIGHTS)
def bench_unquantized(n, k):
    return Gemm(m=1, n=n, k=k, dtype="bf16", transpose_b=True)
