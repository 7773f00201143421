"""A training run by arithmetic: FLOPs of a token, what rate a cluster reaches with them, how long a run takes."""

from __future__ import annotations

import msgspec

from perfsuite.flops import MFU_CONVENTIONS, params_flops_per_token, training_flops_per_token
from perfsuite.models import ModelShape
from perfsuite.utilization import mfu

EXACT = "exact"
SIX_N = "6N"
HFU = "hfu"
PLAN_CONVENTIONS = (EXACT, *MFU_CONVENTIONS, SIX_N)
"""Those whose fraction of the peak is an MFU; ``hfu`` counts what is recomputed, and is none."""
FIVE_POINTS = 0.05
S_PER_HOUR = 3600
H_PER_DAY = 24


class TrainedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained: its parameters, and forward and backward FLOPs of one token by each convention.

    ``seq_len`` and ``hfu_flops_per_token`` are None where only the number of parameters is known.
    """

    name: str
    parameters: int
    active_parameters: int
    seq_len: int | None
    flops_per_token: dict[str, int]
    hfu_flops_per_token: int | None

    @property
    def least_convention(self) -> str:
        """The one that counts what has to be computed, which no cluster does faster than its peak."""
        return EXACT if EXACT in self.flops_per_token else SIX_N


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of one kind; ``peak_flops_per_s`` is one GPU's in ``dtype``, and ``unit`` FLOP/s or OP/s."""

    gpu: str
    gpus: int
    dtype: str
    unit: str
    peak_flops_per_s: float

    @property
    def total_flops_per_s(self) -> float:
        """The peak of all GPUs."""
        return self.gpus * self.peak_flops_per_s

    def utilization(self, *, tokens_per_s: float, flops_per_token: int) -> float:
        """The fraction of the peak; the same for one GPU as for all, since each has its share of both."""
        return mfu(flops=tokens_per_s * flops_per_token, time_s=1.0, peak_flops_per_s=self.total_flops_per_s)

    def tokens_per_s(self, *, utilization: float, flops_per_token: int) -> float:
        """How many tokens a second are this fraction of the peak."""
        return utilization * self.total_flops_per_s / flops_per_token


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Training on ``tokens`` tokens at one rate, without pauses; ``cost`` is in the currency of the price."""

    mfu: float
    tokens: int
    days: float
    gpu_hours: float
    cost: float | None


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A rate held against the peak by every convention; ``convention`` is that of ``run`` and ``run_at_five_more``.

    ``possible`` is false where the rate passes the peak; there are no runs then. ``run_at_five_more`` is the run at
    five points of MFU more, and None where that would pass the peak.
    """

    model: TrainedModel
    cluster: Cluster
    convention: str
    tokens_per_s: float
    mfu: dict[str, float]
    hfu: float | None
    possible: bool
    run: Run | None = None
    run_at_five_more: Run | None = None

    @property
    def most_tokens_per_s(self) -> float:
        """The rate at the peak."""
        return self.tokens_per_s / self.mfu[self.model.least_convention]


def model_of_shape(name: str, shape: ModelShape, *, seq_len: int) -> TrainedModel:
    """A model whose sizes are known, trained on sequences of ``seq_len``; all conventions count it."""

    def counted(convention: str) -> int:
        return training_flops_per_token(shape, seq_len=seq_len, convention=convention)

    by_convention = {convention: counted(convention) for convention in (EXACT, *MFU_CONVENTIONS)}
    return TrainedModel(
        name=name,
        parameters=shape.parameters(),
        active_parameters=shape.parameters(active=True),
        seq_len=seq_len,
        flops_per_token={**by_convention, SIX_N: params_flops_per_token(shape.parameters())},
        hfu_flops_per_token=counted(HFU),
    )


def model_of_params(params: int) -> TrainedModel:
    """A model of which nothing but the number of parameters is known: 6N FLOPs a token, attention not counted."""
    return TrainedModel(
        name="by its parameters",
        parameters=params,
        active_parameters=params,
        seq_len=None,
        flops_per_token={SIX_N: params_flops_per_token(params)},
        hfu_flops_per_token=None,
    )


def estimate(
    model: TrainedModel,
    cluster: Cluster,
    *,
    tokens_per_s: float,
    convention: str,
    tokens: int | None = None,
    price_per_gpu_hour: float | None = None,
) -> Estimate:
    """What a rate of the whole cluster means, and with ``tokens`` what a run of that many takes."""
    fractions = {
        name: cluster.utilization(tokens_per_s=tokens_per_s, flops_per_token=flops)
        for name, flops in model.flops_per_token.items()
    }
    hfu_flops = model.hfu_flops_per_token
    least = fractions[model.least_convention]
    now = fractions[convention]

    def run_at(fraction: float) -> Run | None:
        if tokens is None or not _possible(least * fraction / now):
            return None
        rate = cluster.tokens_per_s(utilization=fraction, flops_per_token=model.flops_per_token[convention])
        return _run(fraction, tokens, rate, cluster.gpus, price_per_gpu_hour)

    return Estimate(
        model=model,
        cluster=cluster,
        convention=convention,
        tokens_per_s=tokens_per_s,
        mfu=fractions,
        hfu=None if hfu_flops is None else cluster.utilization(tokens_per_s=tokens_per_s, flops_per_token=hfu_flops),
        possible=_possible(least),
        run=run_at(now),
        run_at_five_more=run_at(now + FIVE_POINTS),
    )


def _possible(fraction: float) -> bool:
    """Whether a cluster can do that; a plan of 100 % can, whichever way it is rounded."""
    return fraction <= 1 + 1e-12


def _run(fraction: float, tokens: int, tokens_per_s: float, gpus: int, price_per_gpu_hour: float | None) -> Run:
    hours = tokens / tokens_per_s / S_PER_HOUR
    gpu_hours = hours * gpus
    return Run(
        mfu=fraction,
        tokens=tokens,
        days=hours / H_PER_DAY,
        gpu_hours=gpu_hours,
        cost=None if price_per_gpu_hour is None else gpu_hours * price_per_gpu_hour,
    )
