"""How ``perfsuite mfu`` shows its answer: the model, every convention side by side, rates, the run."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from perfsuite import units
from perfsuite.commands.console import facts
from perfsuite.commands.mfu_options import Options
from perfsuite.training_run import Cluster, Estimate, Run, TrainedModel

COUNTS = {
    "exact": "matmuls, causal pairs, active experts",
    "palm": "all parameters, all experts, attention in full",
    "torchtitan": "active experts, attention in full",
    "megatron": "as exact; attention halved, vocabulary padded",
    "6N": "all parameters, all experts, no attention",
}
"""What each convention counts, short enough for a line of 80 columns."""


def tables(estimate: Estimate, options: Options) -> Iterator[Table]:
    """From top to bottom; of an impossible rate no more than why it is one."""
    yield _head(estimate, options)
    if not estimate.possible:
        return
    yield _conventions(estimate)
    yield from _notes(estimate)
    yield _rates(estimate)
    if estimate.run is not None:
        yield _runs(estimate.run, estimate.run_at_five_more)


def sheet_value(peak_flops_per_s: float, unit: str) -> str:
    """A peak with every digit of the data sheet: ``989.5 TFLOP/s``."""
    return f"{peak_flops_per_s / units.TERA:g} T{unit}"


def _head(estimate: Estimate, options: Options) -> Table:
    """What was asked, and the answer or why there is none."""
    model, tokens, cluster = estimate.model, options.tokens_per_step, estimate.cluster
    table = facts()
    table.add_row("Model", _model(model))
    table.add_row("Parameters", _parameters(model))
    table.add_row("Peak", _peak(cluster))
    if tokens is not None:
        flops = float(model.flops_per_token[estimate.convention] * tokens)
        time = _duration(tokens / estimate.tokens_per_s)
        work = units.format_si(flops, cluster.unit.removesuffix("/s"))
        table.add_row("Step", f"{time} for {tokens:,} tokens: {work} by {estimate.convention}")
    table.add_row("MFU", _verdict(estimate, options) if estimate.possible else _impossible(estimate, options))
    return table


def _model(model: TrainedModel) -> str:
    if model.seq_len is None:
        return f"{model.name}: 6N a token, 2N forward, 4N backward, no attention"
    return f"{model.name}, sequences of {model.seq_len:,} tokens"


def _parameters(model: TrainedModel) -> str:
    if model.active_parameters == model.parameters:
        return f"{model.parameters:,}"
    return f"{model.parameters:,}, of which a token uses {model.active_parameters:,}"


def _peak(cluster: Cluster) -> str:
    each = sheet_value(cluster.peak_flops_per_s, cluster.unit)
    return f"{cluster.gpus:,} x {cluster.gpu} of {each} {cluster.dtype}, dense data sheet"


def _verdict(estimate: Estimate, options: Options) -> str:
    percent = f"{units.format_percent(estimate.mfu[estimate.convention])} by {estimate.convention}"
    return f"{percent}, {'planned' if options.planned_mfu is not None else 'measured'}; {_limit(estimate, options)}"


def _impossible(estimate: Estimate, options: Options) -> str:
    least = estimate.model.least_convention
    if options.step_time is not None:
        given = f"{_duration(options.step_time)} a step"
    elif options.planned_mfu is not None:
        given = f"{units.format_percent(options.planned_mfu)} by {estimate.convention}"
    else:
        given = f"{_figure(estimate.tokens_per_s)} tokens/s"
    percent = units.format_percent(estimate.mfu[least])
    return f"impossible: {given} would be {percent} of the peak by {least}; {_limit(estimate, options)}"


def _limit(estimate: Estimate, options: Options) -> str:
    """What the peak allows: the shortest step, or the highest rate."""
    if options.tokens_per_step is None:
        return f"at most {_figure(estimate.most_tokens_per_s)} tokens/s are possible"
    return f"a step takes at least {_duration(options.tokens_per_step / estimate.most_tokens_per_s)}"


def _conventions(estimate: Estimate) -> Table:
    table = _grid("Convention", "GFLOP/token", "MFU")
    table.add_column("counts", overflow="fold")
    for name, fraction in estimate.mfu.items():
        gflop = _figure(estimate.model.flops_per_token[name] / units.GIGA)
        table.add_row(name, gflop, units.format_percent(fraction), COUNTS[name])
    return table


def _notes(estimate: Estimate) -> Iterator[Table]:
    """Hardware FLOPs apart from the MFUs, and what to think of more than 100 %."""
    fractions = dict(estimate.mfu)
    table = facts()
    if estimate.hfu is not None and estimate.model.hfu_flops_per_token is not None:
        fractions["HFU"] = estimate.hfu
        gflop = _figure(estimate.model.hfu_flops_per_token / units.GIGA)
        percent = units.format_percent(estimate.hfu)
        table.add_row("HFU", f"{percent} if everything is recomputed: {gflop} GFLOP/token, palm x 4/3")
    if above := [name for name, fraction in fractions.items() if fraction > 1]:
        table.add_row("Over 100 %", f"{', '.join(above)}: what is not computed is counted too")
    if table.row_count:
        yield table


def _rates(estimate: Estimate) -> Table:
    """One GPU and all of them; each has its share of the tokens and of the peak, so that their MFU is one."""
    cluster = estimate.cluster
    name = estimate.convention
    flops_per_s = estimate.tokens_per_s * estimate.model.flops_per_token[name]
    percent = units.format_percent(estimate.mfu[name])
    shares = [1.0] if cluster.gpus == 1 else [1 / cluster.gpus, 1.0]
    headings = ["a GPU", f"{cluster.gpus:,} GPUs"][: len(shares)]
    table = _grid("Rate", *headings)
    table.add_row("tokens/s", *(_figure(estimate.tokens_per_s * share) for share in shares))
    table.add_row(
        f"{cluster.unit} by {name}", *(units.format_si(flops_per_s * share, cluster.unit) for share in shares)
    )
    table.add_row("peak", *(units.format_si(cluster.total_flops_per_s * share, cluster.unit) for share in shares))
    table.add_row(f"MFU by {name}", *(percent for _ in shares))
    return table


def _runs(run: Run, faster: Run | None) -> Table:
    """The run, the same at five points of MFU more, and what that saves."""
    table = _grid(f"{run.tokens:,} tokens", "days", "GPU-hours", *([] if run.cost is None else ["cost"]))
    table.add_row(*_run(run))
    if faster is None:
        table.add_row("five points more would pass the peak")
        return table
    table.add_row(*_run(faster))
    saved = [now - then for now, then in zip(_figures(run), _figures(faster), strict=True)]
    table.add_row("five points of MFU save", *map(_figure, saved))
    return table


def _run(run: Run) -> list[str]:
    return [f"at {units.format_percent(run.mfu)} MFU", *map(_figure, _figures(run))]


def _figures(run: Run) -> list[float]:
    return [run.days, run.gpu_hours, *([] if run.cost is None else [run.cost])]


def _grid(first: str, *others: str) -> Table:
    """A borderless table: names, then figures."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _figure(value: float) -> str:
    """Three digits, all of them before the point: ``38.5``, ``945,411``."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def _duration(seconds: float) -> str:
    return units.format_time_us(units.s_to_us(seconds))
