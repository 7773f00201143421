"""The options of ``perfsuite mfu``: how each is read, and all of them together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from perfsuite.commands.console import refuse
from perfsuite.models import MODELS
from perfsuite.training_run import PLAN_CONVENTIONS

MODEL = "The model: one of --params, --model, --config or its sizes"
SIZES = "The model by its sizes"
RATE = "The rate: a step and its tokens, tokens per second, or a planned MFU"
RUN = "The run"
LEAST, MOST = 1e-24, 1e24
"""Beyond anything that is trained or paid; products of several are still numbers."""
MOST_OF_A_SIZE = 10**9
"""Beyond any size of a model and any context."""


class Format(StrEnum):
    """How the answer is written."""

    TABLE = "table"
    JSON = "json"


def _number(option: str, example: str = "7e9") -> Callable[[object], float]:
    """A parser of positive finite numbers that refuses others in one line."""

    def parse(text: object) -> float:
        try:
            value = float(str(text))
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value <= 0:
            refuse(f"{option} {text}: give a positive number, such as {example}")
        if not LEAST <= value <= MOST:
            refuse(f"{option} {text}: give a number between {LEAST:g} and {MOST:g}")
        return value

    return parse


def _whole(option: str, example: str = "7e9") -> Callable[[object], int]:
    """A parser of positive whole numbers; ``7e9`` is one."""
    number = _number(option, example)

    def parse(text: object) -> int:
        value = number(text)
        if value != int(value):
            refuse(f"{option} {text}: give a whole number")
        return int(value)

    return parse


def _bounded(option: str, example: str) -> Callable[[object], int]:
    """A parser of one size of a model."""
    whole = _whole(option, example)

    def parse(text: object) -> int:
        value = whole(text)
        if value > MOST_OF_A_SIZE:
            refuse(f"{option} {text}: give at most {MOST_OF_A_SIZE:g}, such as {example}")
        return value

    return parse


def _fraction(option: str) -> Callable[[object], float]:
    """A parser of what lies above 0 and not above 1."""
    number = _number(option, "0.4")

    def parse(text: object) -> float:
        value = number(text)
        if value > 1:
            refuse(f"{option} {text}: give a fraction of at most 1, such as 0.4 for 40 %")
        return value

    return parse


def _option(panel: str, flag: str, metavar: str | None, text: str, **parser: Any) -> Any:
    return typer.Option(flag, metavar=metavar, help=text, rich_help_panel=panel, **parser)


def _size(flag: str, metavar: str, text: str, example: str) -> Any:
    """One of the model's sizes."""
    return _option(SIZES, flag, metavar, text, parser=_bounded(flag, example))


Params = Annotated[
    int | None,
    _option(MODEL, "--params", "N", "Parameters; a token is then 6N FLOPs: 7e9.", parser=_whole("--params")),
]
Model = Annotated[str | None, _option(MODEL, "--model", "PRESET", f"One of {', '.join(MODELS)}.")]
Config = Annotated[
    Path | None, _option(MODEL, "--config", "FILE", "A config.json as Hugging Face's Transformers writes it.")
]
SeqLen = Annotated[
    int | None,
    _option(
        MODEL,
        "--seq-len",
        "T",
        "Tokens of a sequence. Left out: what the preset was trained on, or the config's longest.",
        parser=_bounded("--seq-len", "8192"),
    ),
]
Layers = Annotated[int | None, _size("--layers", "L", "Layers.", "32")]
Width = Annotated[int | None, _size("--d-model", "D", "The model's width.", "4096")]
Heads = Annotated[int | None, _size("--heads", "H", "Query heads.", "32")]
KvHeads = Annotated[int | None, _size("--kv-heads", "K", "Heads of keys and of values. Left out: --heads.", "8")]
HeadDim = Annotated[int | None, _size("--head-dim", "Q", "Size of a head. Left out: D / H.", "128")]
MlpWidth = Annotated[int | None, _size("--d-ff", "F", "Width of the MLP, or of one expert.", "14336")]
Vocab = Annotated[int | None, _size("--vocab", "V", "Entries of the vocabulary.", "128256")]
Experts = Annotated[int | None, _size("--experts", "E", "Experts of a mixture.", "8")]
ActiveExperts = Annotated[int | None, _size("--active-experts", "A", "Experts that a token uses.", "2")]
Gated = Annotated[
    bool | None,
    _option(SIZES, "--gated/--no-gated", None, "Of Llama's kind (SwiGLU, no biases; the default), or of GPT's."),
]
Tied = Annotated[
    bool | None,
    _option(SIZES, "--tied/--untied", None, "Whether input embedding and output head are one matrix; untied."),
]
StepTime = Annotated[
    float | None,
    _option(RATE, "--step-time", "S", "Measured: seconds that one step takes.", parser=_number("--step-time", "1.5")),
]
TokensPerStep = Annotated[
    int | None,
    _option(
        RATE,
        "--tokens-per-step",
        "N",
        "Tokens of one step over all GPUs: sequence length x batch.",
        parser=_whole("--tokens-per-step", "65536"),
    ),
]
TokensPerSecond = Annotated[
    float | None,
    _option(
        RATE,
        "--tokens-per-second",
        "R",
        "Measured: tokens a second over all GPUs.",
        parser=_number("--tokens-per-second", "90000"),
    ),
]
PlannedMfu = Annotated[
    float | None,
    _option(RATE, "--mfu", "F", "Planned: an MFU as a fraction, such as 0.4.", parser=_fraction("--mfu")),
]
Convention = Annotated[
    str | None,
    _option(RATE, "--convention", "NAME", f"What --mfu and the run go by: {', '.join(PLAN_CONVENTIONS)}."),
]
Tokens = Annotated[
    int | None,
    _option(RUN, "--tokens", "N", "Tokens of the whole run: 300e9.", parser=_whole("--tokens", "300e9")),
]
Price = Annotated[
    float | None,
    _option(
        RUN,
        "--price-per-gpu-hour",
        "P",
        "What one GPU costs an hour, in any currency.",
        parser=_number("--price-per-gpu-hour", "2"),
    ),
]
Gpu = Annotated[str, typer.Option("--gpu", metavar="SKU", help="SKU or family, as `perfsuite hardware` lists them.")]
Gpus = Annotated[int, typer.Option("--gpus", parser=_whole("--gpus", "8"), metavar="N", help="How many GPUs.")]
DType = Annotated[str, typer.Option("--dtype", metavar="NAME", help="Data type of the matmuls.")]
OutputFormat = Annotated[Format, typer.Option("--format", help="A table for people, or one JSON object.")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked; None where an option was left out."""

    params: int | None
    model: str | None
    config: Path | None
    seq_len: int | None
    layers: int | None
    d_model: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    d_ff: int | None
    vocab: int | None
    experts: int | None
    active_experts: int | None
    gated: bool | None
    tied: bool | None
    step_time: float | None
    tokens_per_step: int | None
    tokens_per_second: float | None
    planned_mfu: float | None
    convention: str | None
    tokens: int | None
    price: float | None
    gpu: str
    gpus: int
    dtype: str
    output_format: Format
