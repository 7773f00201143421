"""Builds this rank's part of a parallel training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from perfsuite.workloads.base import Prepared
from perfsuite.workloads.exposure import BlockedMeter
from perfsuite.workloads.layout import Layout, Whole, build_model, layout_for
from perfsuite.workloads.optimizers import optimizer_for
from perfsuite.workloads.parallel import Parallel
from perfsuite.workloads.parallel_training import ParallelTraining, Passes, Pipelined, WholeModel
from perfsuite.workloads.routing import RoutedTokens
from perfsuite.workloads.training import Training, loss_function

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that a parallel training is made of; ``batch`` is one data-parallel rank's micro-batch.

    ``routing_for`` gives the routing of a number of tokens. ``alone`` builds the same training on one rank, which needs
    ``alone_bytes``; a rank's part of the parallel one needs ``own_bytes``.
    """

    parallel: Parallel
    whole: Whole
    batch: int
    seq_len: int
    accumulate: int
    optimizer: str
    clip: float | None
    autocast: torch.dtype | None
    tolerance: float
    routing_for: Callable[[int], RoutedTokens | None]
    alone: Callable[[int], Training]
    alone_bytes: int
    own_bytes: int

    def prepare(self, device: str) -> Prepared:
        """The step, its check, and one rank's step to compare with where there is room for it."""
        training = self.training(device)
        alone = Alone(partial(self.alone, self.accumulate)) if training.alone else None
        return Prepared(
            step=training.step_on_new_tokens,
            check=training.check,
            reset=training.meter.reset,
            shares=training.shares,
            resident_bytes=training.resident_bytes,
            close=alone.close if alone else None,
            alone=alone,
            alone_share=1 / self.parallel.data_size,
        )

    def training(self, device: str) -> ParallelTraining:
        """This rank's part, in the default process group. A CaseError where that has another number of ranks."""
        import torch

        layout = layout_for(self.parallel, device)
        fits = self._alone_fits(layout, device)
        model, passes = self._pipelined(layout, device) if self.parallel.pipeline > 1 else self._whole(layout, device)
        shape = self.whole.shape
        return ParallelTraining(
            layout=layout,
            model=model,
            optimizer=optimizer_for(self.optimizer, model.parameters(), width=shape.d_model),
            passes=passes,
            tokens=torch.zeros((self.batch, self.seq_len + 1), dtype=torch.int64, device=device),
            vocab=shape.vocab,
            accumulate=self.accumulate,
            clip=self.clip,
            tolerance=self.tolerance,
            alone=self.alone if fits else None,
            meter=BlockedMeter(),
        )

    def _whole(self, layout: Layout, device: str) -> tuple[Any, Passes]:
        model = build_model(self.whole, layout, device)
        routing = self.routing_for(self.batch * self.seq_len)
        loss_of = loss_function(model, routing, autocast=self.autocast)
        return model, WholeModel(model=model, loss_of=loss_of, parallel=self.parallel)

    def _pipelined(self, layout: Layout, device: str) -> tuple[Any, Passes]:
        import torch
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        from perfsuite.workloads.modules.stages import Stage

        parallel, shape = self.parallel, self.whole.shape
        place, batch = layout.place("pipeline"), self.batch // parallel.chunks
        layers = parallel.stage_layers(shape)[place]
        routing = self.routing_for(batch * self.seq_len)
        model = build_model(
            self.whole, layout, device, stage=partial(Stage, layers=layers, routing=routing, autocast=self.autocast)
        )
        stream = torch.empty(
            (batch, self.seq_len, shape.d_model), dtype=self.whole.dtype, device="meta", requires_grad=True
        )
        ids = torch.empty((batch, self.seq_len), dtype=torch.int64, device="meta")
        is_last = place == parallel.pipeline - 1
        stage = PipelineStage(
            model,
            place,
            parallel.pipeline,
            torch.device(device),
            input_args=stream if place else ids,
            output_args=torch.empty(1, device="meta", requires_grad=True) if is_last else stream,
            group=layout.mesh.get_group("pipeline"),
        )
        kind: Any = Schedule1F1B if parallel.schedule == "1f1b" else ScheduleGPipe
        schedule = kind(stage, n_microbatches=parallel.chunks, loss_fn=_its_own_loss)
        return model, Pipelined(schedule=schedule, layout=layout)

    def _alone_fits(self, layout: Layout, device: str) -> bool:
        """Whether the one-rank model has room beside the parallel one, on every rank: they have to decide alike."""
        import torch

        kind = torch.device(device).type
        if kind == "cpu":
            return True
        free_bytes, _ = getattr(torch, kind).mem_get_info(device)
        return min(layout.gather(float(free_bytes))) >= self.alone_bytes + self.own_bytes


def _its_own_loss(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    """The last stage has computed it."""
    return output.squeeze(0)


class Alone:
    """A one-rank step, built when it is first asked for: of a group only one rank ever is."""

    def __init__(self, build: Callable[[], Training]) -> None:
        self._build = build
        self._training: Training | None = None

    def __call__(self) -> torch.Tensor:
        """One step."""
        if self._training is None:
            self._training = self._build()
        return self._training.step_on_new_tokens()

    def close(self) -> None:
        """Let the model go."""
        self._training = None
