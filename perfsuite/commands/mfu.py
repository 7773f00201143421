"""``perfsuite mfu``: model FLOPs utilization, rate, time and cost of training, measured or planned."""

from __future__ import annotations

import msgspec
import typer

from perfsuite.commands import mfu_options as given
from perfsuite.commands.console import output, refuse
from perfsuite.commands.mfu_model import trained_model
from perfsuite.commands.mfu_options import Format, Options
from perfsuite.commands.mfu_tables import sheet_value, tables
from perfsuite.errors import HardwareError
from perfsuite.hardware.catalogue import PEAK_DTYPES, Hardware, load
from perfsuite.training_run import HFU, PLAN_CONVENTIONS, Cluster, Estimate, TrainedModel, estimate
from perfsuite.utilization import Ceiling, compute_ceiling

IMPOSSIBLE = 1
TRAINING_DTYPES = tuple(dtype for dtype in PEAK_DTYPES if dtype != "int8")
"""Whole numbers have no gradients."""
RATES = "--step-time S with --tokens-per-step N, --tokens-per-second R, or --mfu F"


def mfu(
    gpu: given.Gpu,
    gpus: given.Gpus = 1,
    dtype: given.DType = "bf16",
    params: given.Params = None,
    model: given.Model = None,
    config: given.Config = None,
    seq_len: given.SeqLen = None,
    layers: given.Layers = None,
    d_model: given.Width = None,
    heads: given.Heads = None,
    kv_heads: given.KvHeads = None,
    head_dim: given.HeadDim = None,
    d_ff: given.MlpWidth = None,
    vocab: given.Vocab = None,
    experts: given.Experts = None,
    active_experts: given.ActiveExperts = None,
    gated: given.Gated = None,
    tied: given.Tied = None,
    step_time: given.StepTime = None,
    tokens_per_step: given.TokensPerStep = None,
    tokens_per_second: given.TokensPerSecond = None,
    planned_mfu: given.PlannedMfu = None,
    convention: given.Convention = None,
    tokens: given.Tokens = None,
    price: given.Price = None,
    output_format: given.OutputFormat = Format.TABLE,
) -> None:
    """Model FLOPs utilization of training by every convention, measured or planned; rate, time and cost of a run.

    Exit code 1 where the numbers would pass the dense peak.
    """
    # Nothing but the options is local here: naming each of them again would be half of a page.
    _answer(Options(**locals()))


def _answer(options: Options) -> None:
    """Print the estimate; exit code 1 where it is impossible."""
    found = _estimate(options)
    if options.output_format is Format.JSON:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        console = output()
        for number, table in enumerate(tables(found, options)):
            if number:
                console.print()
            console.print(table)
    if not found.possible:
        raise typer.Exit(IMPOSSIBLE)


def _estimate(options: Options) -> Estimate:
    model = trained_model(options)
    convention = _convention(options, model)
    _refuse_contradiction(options)
    cluster = _cluster(options)
    return estimate(
        model,
        cluster,
        tokens_per_s=_tokens_per_s(options, cluster, model.flops_per_token[convention]),
        convention=convention,
        tokens=options.tokens,
        price_per_gpu_hour=options.price,
    )


def _convention(options: Options, model: TrainedModel) -> str:
    """What a planned MFU and five points more go by."""
    name = options.convention
    if name is None:
        return model.least_convention
    if name == HFU:
        refuse(f"--convention {HFU}: an HFU is no MFU; use one of {', '.join(PLAN_CONVENTIONS)}")
    if name not in PLAN_CONVENTIONS:
        refuse(f"--convention {name}: use one of {', '.join(PLAN_CONVENTIONS)}")
    if name not in model.flops_per_token:
        refuse(f"--convention {name}: needs a model's sizes; with --params there is {', '.join(model.flops_per_token)}")
    return name


def _refuse_contradiction(options: Options) -> None:
    """A rate is given once, and a price has a run that it is for."""
    ways = {
        "--step-time": options.step_time,
        "--tokens-per-second": options.tokens_per_second,
        "--mfu": options.planned_mfu,
    }
    flags = [flag for flag, value in ways.items() if value is not None]
    if len(flags) > 1:
        refuse(f"{' and '.join(flags)} contradict each other; give one of {RATES}")
    if options.price is not None and options.tokens is None:
        refuse("--price-per-gpu-hour needs --tokens N: how many tokens the run has")


def _tokens_per_s(options: Options, cluster: Cluster, flops_per_token: int) -> float:
    """The rate of all GPUs, measured or planned."""
    if options.tokens_per_second is not None:
        return options.tokens_per_second
    if options.planned_mfu is not None:
        return cluster.tokens_per_s(utilization=options.planned_mfu, flops_per_token=flops_per_token)
    if options.step_time is None:
        refuse(f"no rate: give one of {RATES}")
    if options.tokens_per_step is None:
        refuse("--step-time needs --tokens-per-step N: how many tokens all GPUs do in a step")
    return options.tokens_per_step / options.step_time


def _cluster(options: Options) -> Cluster:
    ceiling, name = _ceiling(options.gpu, options.dtype)
    return Cluster(gpu=name, gpus=options.gpus, dtype=options.dtype, unit=ceiling.unit, peak_flops_per_s=ceiling.value)


def _ceiling(gpu: str, dtype: str) -> tuple[Ceiling, str]:
    """The peak that every SKU called ``gpu`` agrees on, and what to call it."""
    if dtype not in TRAINING_DTYPES:
        why = "there is no training in it; " if dtype in PEAK_DTYPES else ""
        refuse(f"--dtype {dtype}: {why}use one of {', '.join(TRAINING_DTYPES)}")
    if gpu.strip().lower().split("-")[0] == "cpu":
        raise HardwareError(f"--gpu {gpu}: a CPU has no data-sheet peak; name a GPU, see `perfsuite hardware`")
    rows = load().resolve(gpu)
    found = {row.sku: compute_ceiling(row, dtype) for row in rows}
    ceilings = [ceiling for ceiling in found.values() if ceiling is not None]
    if len({ceiling and ceiling.value for ceiling in found.values()}) > 1:
        raise HardwareError(f"--gpu {gpu}: {_differ(rows, dtype)}; name the SKU")
    if not ceilings:
        refuse(f"--dtype {dtype}: {gpu} has no {dtype} peak; it has {', '.join(_has(rows[0]))}")
    return ceilings[0], _called(rows)


def _has(row: Hardware) -> list[str]:
    """The data types to train in that have a peak here."""
    return [dtype for dtype in row.dtypes() if dtype in TRAINING_DTYPES]


def _called(rows: tuple[Hardware, ...]) -> str:
    """The family where several SKUs agree, else the SKU and what a package is."""
    if len(rows) > 1:
        return rows[0].family
    row = rows[0]
    return row.sku if row.torch_devices == 1 else f"{row.sku} package ({row.torch_devices} torch devices)"


def _differ(rows: tuple[Hardware, ...], dtype: str) -> str:
    peaks = ((row.sku, compute_ceiling(row, dtype)) for row in rows)
    each = (f"{sku} {'unknown' if peak is None else sheet_value(peak.value, peak.unit)}" for sku, peak in peaks)
    return f"its SKUs have different {dtype} peaks: {', '.join(each)}"
