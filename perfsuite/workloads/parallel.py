"""How a group of ranks divides a training step: data, tensor and pipeline parallel, declared by numbers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from perfsuite.errors import CaseError
from perfsuite.models import ModelShape
from perfsuite.workloads.base import Description, one_of, positive_int

DATA = ("ddp", "fsdp2")
SCHEDULES = ("1f1b", "gpipe")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A training step on ``ranks`` ranks: ``tensor`` of them share each matrix, ``pipeline`` the layers.

    The ranks // (tensor x pipeline) groups that are left train on batches of their own: ``data`` says whether each has
    the whole model (``ddp``, gradients in buckets of ``bucket_mib`` MiB) or a share of it (``fsdp2``). Their gradients
    are exchanged at every ``sync_every``-th accumulated micro-batch. A pipeline cuts its batch into ``microbatches``,
    one for each stage where none are given, and runs them by ``schedule``. One rank is a plain step.
    A CaseError names what cannot be.
    """

    ranks: int
    data: str | None = None
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    microbatches: int | None = None
    bucket_mib: float = 25.0
    sync_every: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "tensor", "pipeline", "sync_every"):
            positive_int("Parallel", name, getattr(self, name))
        one_of("Parallel", "schedule", self.schedule, SCHEDULES)
        if self.data is not None:
            one_of("Parallel", "data", self.data, DATA)
        self._check_counts()
        _check_bucket(self.bucket_mib)
        self._check_pipeline()

    def _check_counts(self) -> None:
        """The sizes of the group's dimensions."""
        each = self.tensor * self.pipeline
        if self.ranks % each:
            raise CaseError(f"Parallel: ranks={self.ranks} must be a multiple of tensor x pipeline = {each}")
        if self.data_size > 1 and self.data is None:
            raise CaseError(
                f"Parallel: data=None with {self.data_size} groups of {each} ranks: say data='ddp' or data='fsdp2'"
            )

    def _check_pipeline(self) -> None:
        """What goes with a pipeline, and what needs one."""
        if self.pipeline > 1 and self.tensor > 1:
            raise CaseError(f"Parallel: tensor={self.tensor} must be 1 with pipeline={self.pipeline}")
        if self.pipeline > 1 and self.data == "fsdp2":
            raise CaseError(f"Parallel: data='fsdp2' does not go with pipeline={self.pipeline}; use data='ddp'")
        if self.microbatches is not None:
            positive_int("Parallel", "microbatches", self.microbatches)
            if self.pipeline == 1:
                raise CaseError(f"Parallel: microbatches={self.microbatches} needs a pipeline; leave it out")
            # torch's own 1F1B refuses fewer micro-batches than stages.
            if self.schedule == "1f1b" and self.microbatches < self.pipeline:
                raise CaseError(
                    f"Parallel: microbatches={self.microbatches} must be at least pipeline={self.pipeline} for 1f1b"
                )

    @property
    def data_size(self) -> int:
        """How many batches are trained on side by side."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def chunks(self) -> int:
        """The micro-batches of a pipeline; 1 without."""
        return self.microbatches or self.pipeline

    @property
    def shards(self) -> int:
        """Over how many data-parallel ranks parameters, gradients and optimizer state are divided."""
        return self.data_size if self.data == "fsdp2" else 1

    @property
    def replicates(self) -> bool:
        """Whether DDP averages gradients."""
        return self.data == "ddp" and self.data_size > 1

    @cached_property
    def bubble(self) -> float | None:
        """The share of a pipeline's step in which a stage has nothing to do, all micro-batches taking equally long.

        (p - 1) / (m + p - 1) of GPipe (arXiv:1811.06965) and 1F1B alike, for p stages and m micro-batches.
        """
        if self.pipeline == 1:
            return None
        return (self.pipeline - 1) / (self.chunks + self.pipeline - 1)

    def describe(self) -> Description:
        """The layout, for the record; only what it makes use of."""
        data = self.data if self.data_size > 1 else None
        found: Description = {"ranks": self.ranks, "data": data, "tensor": self.tensor, "pipeline": self.pipeline}
        if self.pipeline > 1:
            found |= {"schedule": self.schedule, "microbatches": self.chunks}
        if self.replicates:
            found["bucket_mib"] = float(self.bucket_mib)
        if data is not None:
            found["sync_every"] = self.sync_every
        return found

    def check(self, shape: ModelShape, *, model: str, batch: int, accumulate: int) -> None:
        """Whether this model and these batches can be divided so, or a CaseError."""
        if accumulate % self.sync_every:
            raise CaseError(f"Parallel: sync_every={self.sync_every} must divide accumulate={accumulate}")
        if max(self.tensor, self.pipeline) > 1 and (shape.tied or shape.bias):
            raise CaseError(
                f"Parallel: model={model!r} cannot be divided by tensor or pipeline: its head is its embedding; "
                "use a model of Llama's kind"
            )
        if self.pipeline > 1:
            self._check_stages(shape, batch=batch, accumulate=accumulate)
        if self.tensor > 1:
            self._check_heads(shape)

    def _check_stages(self, shape: ModelShape, *, batch: int, accumulate: int) -> None:
        if self.pipeline > shape.layers:
            raise CaseError(f"Parallel: pipeline={self.pipeline} must not exceed the model's {shape.layers} layers")
        if batch % self.chunks:
            raise CaseError(f"Parallel: microbatches={self.chunks} must divide batch={batch}")
        if accumulate > 1:
            raise CaseError(
                f"Parallel: accumulate={accumulate} must be 1 with a pipeline, whose microbatches are accumulated"
            )

    def _check_heads(self, shape: ModelShape) -> None:
        for name in ("heads", "kv_heads", "d_ff", "vocab"):
            if getattr(shape, name) % self.tensor:
                raise CaseError(f"Parallel: tensor={self.tensor} must divide the model's {name}={getattr(shape, name)}")

    def local_shape(self, shape: ModelShape) -> ModelShape:
        """What one rank has of each layer and table: whole heads, and equal parts of MLP and vocabulary."""
        parts = {name: getattr(shape, name) // self.tensor for name in ("heads", "kv_heads", "d_ff", "vocab")}
        return replace(shape, **parts)

    def stage_layers(self, shape: ModelShape) -> list[range]:
        """The layers of each stage, as equal in number as can be; the first stages have one more."""
        each, more = divmod(shape.layers, self.pipeline)
        starts = [stage * each + min(stage, more) for stage in range(self.pipeline + 1)]
        return [range(start, end) for start, end in pairwise(starts)]


def _check_bucket(bucket_mib: object) -> None:
    """Nothing where DDP can make buckets of this size, or a CaseError."""
    is_number = isinstance(bucket_mib, int | float) and not isinstance(bucket_mib, bool)
    if not is_number or not 0 < bucket_mib < math.inf:  # type: ignore[operator] # is_number has looked
        raise CaseError(f"Parallel: bucket_mib={bucket_mib!r} must be a finite number above 0")
