"""``perfsuite mfu``: model FLOPs utilization of a training step from a few numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer

from perfsuite import units
from perfsuite.commands.console import facts, output, refuse
from perfsuite.errors import HardwareError
from perfsuite.flops import params_flops_per_token, training_flops_per_token
from perfsuite.hardware.catalogue import PEAK_DTYPES, Hardware, load
from perfsuite.models import MODELS
from perfsuite.utilization import Ceiling, Part, compute_ceiling, ideal_time_s, mixed_mfu

IMPOSSIBLE = 1


def _number(option: str) -> Callable[[object], float]:
    """A parser of positive finite numbers that refuses others in one line."""

    def parse(text: object) -> float:
        try:
            value = float(str(text))
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value <= 0:
            refuse(f"{option} {text}: give a positive number, such as 7e9")
        return value

    return parse


def _whole(option: str) -> Callable[[object], int]:
    """A parser of positive whole numbers; ``7e9`` is one."""
    number = _number(option)

    def parse(text: object) -> int:
        value = number(text)
        if value != int(value):
            refuse(f"{option} {text}: give a whole number")
        return int(value)

    return parse


Params = Annotated[
    int | None, typer.Option("--params", parser=_whole("--params"), metavar="N", help="Parameters of the model: 7e9.")
]
Model = Annotated[
    str | None, typer.Option("--model", metavar="PRESET", help=f"In place of --params: {', '.join(MODELS)}.")
]
SeqLen = Annotated[
    int | None,
    typer.Option("--seq-len", parser=_whole("--seq-len"), metavar="T", help="Tokens of a sequence, for --model."),
]
TokensPerStep = Annotated[
    int,
    typer.Option(
        "--tokens-per-step",
        parser=_whole("--tokens-per-step"),
        metavar="N",
        help="Tokens of one step over all GPUs: sequence length x batch.",
    ),
]
StepTime = Annotated[
    float,
    typer.Option("--step-time", parser=_number("--step-time"), metavar="S", help="Seconds that one step takes."),
]
Gpu = Annotated[str, typer.Option("--gpu", metavar="SKU", help="SKU or family, as `perfsuite hardware` lists them.")]
Gpus = Annotated[int, typer.Option("--gpus", parser=_whole("--gpus"), metavar="N", help="How many GPUs.")]
DType = Annotated[str, typer.Option("--dtype", help="Data type of the matmuls.")]


@dataclass(frozen=True, kw_only=True)
class _Count:
    """FLOPs of one token, of what, and by which convention."""

    flops_per_token: int
    of: str
    convention: str


def mfu(
    tokens_per_step: TokensPerStep,
    step_time: StepTime,
    gpu: Gpu,
    params: Params = None,
    model: Model = None,
    seq_len: SeqLen = None,
    gpus: Gpus = 1,
    dtype: DType = "bf16",
) -> None:
    """Model FLOPs utilization of a training step, or why the numbers cannot be.

    With --params, 6N FLOPs a token and no attention; with --model, its exact
    count. Exit code 1 where the step would pass the dense peak.
    """
    count = _count(params, model, seq_len)
    ceiling, name = _ceiling(gpu, dtype)
    flops = float(count.flops_per_token * tokens_per_step)
    part = Part(flops=flops, peak_flops_per_s=ceiling.value * gpus)
    fraction = mixed_mfu([part], time_s=step_time)
    table = facts()
    table.add_row("FLOPs", f"{units.format_si(flops, 'FLOP')} a step: {count.of} x {tokens_per_step:,} tokens")
    table.add_row("Convention", count.convention)
    table.add_row("Peak", _peak(ceiling, name, gpus, dtype))
    table.add_row("MFU", _verdict(fraction, step_time, ideal_time_s([part])))
    output().print(table)
    if fraction > 1:
        raise typer.Exit(IMPOSSIBLE)


def _count(params: int | None, model: str | None, seq_len: int | None) -> _Count:
    """What one token costs, from the number of parameters or from a preset and its sequence length."""
    if params is not None and model is None and seq_len is None:
        return _Count(
            flops_per_token=params_flops_per_token(params),
            of=f"6 x {params:,} parameters",
            convention="6N a token: forward 2N, backward 4N; attention is not counted",
        )
    if params is not None or model is None or seq_len is None:
        refuse("give either --params N, or --model PRESET with --seq-len T")
    if model not in MODELS:
        refuse(f"--model {model}: use one of {', '.join(MODELS)}")
    return _Count(
        flops_per_token=training_flops_per_token(MODELS[model], seq_len=seq_len, convention="exact"),
        of=model,
        convention="exact: matmuls and causal attention, forward and twice that backward",
    )


def _peak(ceiling: Ceiling, name: str, gpus: int, dtype: str) -> str:
    total = units.format_si(ceiling.value * gpus, ceiling.unit)
    return f"{total}: {gpus} x {name} of {_sheet_value(ceiling)} {dtype}, dense data sheet"


def _sheet_value(ceiling: Ceiling) -> str:
    """The peak with every digit of the data sheet: ``989.5 TFLOP/s``."""
    return f"{ceiling.value / units.TERA:g} T{ceiling.unit}"


def _verdict(fraction: float, step_time_s: float, least_s: float) -> str:
    percent = units.format_percent(fraction)
    least = units.format_time_us(units.s_to_us(least_s))
    if fraction <= 1:
        return f"{percent} (100 % would take {least} a step)"
    given = units.format_time_us(units.s_to_us(step_time_s))
    return f"impossible: {given} a step would be {percent} of the peak; a step takes at least {least}"


def _ceiling(gpu: str, dtype: str) -> tuple[Ceiling, str]:
    """The peak that every SKU called ``gpu`` agrees on, and what to call it."""
    if dtype not in PEAK_DTYPES:
        refuse(f"--dtype {dtype}: use one of {', '.join(PEAK_DTYPES)}")
    if gpu.strip().lower().split("-")[0] == "cpu":
        raise HardwareError(f"--gpu {gpu}: a CPU has no data-sheet peak; name a GPU, see `perfsuite hardware`")
    rows = load().resolve(gpu)
    found = {row.sku: compute_ceiling(row, dtype) for row in rows}
    ceilings = [ceiling for ceiling in found.values() if ceiling is not None]
    if len({ceiling and ceiling.value for ceiling in found.values()}) > 1:
        raise HardwareError(f"--gpu {gpu}: {_differ(rows, dtype)}; name the SKU")
    if not ceilings:
        refuse(f"--dtype {dtype}: {gpu} has no {dtype} peak; it has {', '.join(rows[0].dtypes())}")
    return ceilings[0], _called(rows)


def _called(rows: tuple[Hardware, ...]) -> str:
    """The family where several SKUs agree, else the SKU and what a package is."""
    if len(rows) > 1:
        return rows[0].family
    row = rows[0]
    return row.sku if row.torch_devices == 1 else f"{row.sku} package ({row.torch_devices} torch devices)"


def _differ(rows: tuple[Hardware, ...], dtype: str) -> str:
    peaks = ((row.sku, compute_ceiling(row, dtype)) for row in rows)
    each = (f"{sku} {'unknown' if peak is None else _sheet_value(peak)}" for sku, peak in peaks)
    return f"its SKUs have different {dtype} peaks: {', '.join(each)}"
