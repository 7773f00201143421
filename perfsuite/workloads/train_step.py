"""A whole training step of a published model, from its input to the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from perfsuite.dtypes import dtype_of
from perfsuite.errors import CaseError
from perfsuite.flops import (
    MFU_CONVENTIONS,
    Parts,
    checkpointed,
    head_part,
    layer_parts,
    repeated,
    trained,
    training_flops_per_token,
)
from perfsuite.footprint import FP32_BYTES, INDEX_BYTES
from perfsuite.models import ModelShape, model_shape
from perfsuite.workloads.base import (
    Description,
    Prepared,
    Target,
    Work,
    Workload,
    lacks_dtype,
    one_of,
    positive_int,
    true_or_false,
    work_of_parts,
)
from perfsuite.workloads.execution import compiled, launch_of, why_not
from perfsuite.workloads.input_pipeline import Feed, InputPipeline
from perfsuite.workloads.layout import Whole
from perfsuite.workloads.optimizers import OPTIMIZERS, optimizer_for
from perfsuite.workloads.parallel import Parallel
from perfsuite.workloads.parallel_build import Recipe
from perfsuite.workloads.parallel_memory import group_parameters, rank_memory
from perfsuite.workloads.routing import RoutedTokens, Routing, prepare
from perfsuite.workloads.tensors import SEED, random_integers, random_source, torch_dtype
from perfsuite.workloads.training import Training, loss_function

if TYPE_CHECKING:
    import torch

DTYPES = ("fp32", "tf32", "bf16")
EXECUTIONS = ("eager", "compile")
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 2e-2}
"""So far, as a fraction, may a compiled model's loss be from the eager one's."""


@dataclass(frozen=True, kw_only=True)
class TrainStep(Workload):
    """One optimizer step of ``model`` on ``accumulate`` micro-batches of ``batch`` sequences of ``seq_len`` tokens.

    For each micro-batch: its tokens (new random ones, or those of the ``input`` pipeline), forward pass, cross entropy
    in fp32 and backward pass; then the gradients are clipped to the norm ``clip`` and ``optimizer`` takes a step. With
    ``autocast`` the parameters are fp32 and the matmuls in ``dtype``, otherwise all is in ``dtype``. ``checkpoint``
    recomputes each layer in the backward pass. Every expert of a mixture gets the same number of tokens. ``layers``
    takes the place of the model's own number. With ``parallel`` a group of ranks takes the step together; ``batch`` is
    then that of one data-parallel rank, and the declared work the whole group's. A CaseError names what cannot be.
    """

    kind = "train_step"
    metric = "mfu"
    rotates = False  # what a step leaves in a cache is its own, and the next one's to find

    model: str = "gpt2-124m"
    batch: int
    seq_len: int
    layers: int | None = None
    optimizer: str = "adamw"
    accumulate: int = 1
    clip: float | None = 1.0
    autocast: bool = False
    checkpoint: bool = False
    execution: str = "eager"
    input: InputPipeline | None = None
    parallel: Parallel | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch", "seq_len", "accumulate"):
            positive_int("TrainStep", name, getattr(self, name))
        for name in ("autocast", "checkpoint"):
            true_or_false("TrainStep", name, getattr(self, name))
        one_of("TrainStep", "optimizer", self.optimizer, OPTIMIZERS)
        one_of("TrainStep", "execution", self.execution, EXECUTIONS)
        _check_numbers(self)
        positions = self.shape.positions
        if positions and self.seq_len > positions:
            raise CaseError(
                f"TrainStep: seq_len={self.seq_len} must not exceed the {positions} positions of {self.model}"
            )
        _check_parallel(self)

    @cached_property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return model_shape(self.model, layers=self.layers)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch * self.seq_len

    @property
    def group(self) -> Parallel:
        """How the ranks divide the step; of one rank where there is nothing to divide."""
        return self.parallel or Parallel(ranks=1)

    @property
    def parameter_dtype(self) -> str:
        """What parameters, gradients and optimizer state are stored in."""
        return "fp32" if self.autocast else self.dtype

    def parts(self) -> Parts:
        """Forward and backward of every layer and of the head, for all micro-batches of the group."""
        router = "fp32" if dtype_of(self.dtype).itemsize < FP32_BYTES else None
        layer = trained(layer_parts(self.shape, batch=self.batch, q_len=self.seq_len, router_dtype=router))
        if self.checkpoint:
            layer = checkpointed(layer)
        head = trained((head_part(self.shape, tokens=self.tokens),))
        batches = self.accumulate * self.group.data_size
        return (*repeated(layer, self.shape.layers * batches), *repeated(head, batches))

    def work(self) -> Work:
        """Parameters and optimizer state read and written, token ids read, the loss written.

        Gradients and activations come into being and go within the step.
        """
        shape, tokens = self.shape, self.accumulate * self.group.data_size * self.tokens
        held = (1 + OPTIMIZERS[self.optimizer].states) * group_parameters(shape, self.group)
        ids = self.accumulate * self.batch * (self.seq_len + 1) * INDEX_BYTES
        return work_of_parts(
            self.parts(),
            dtype=self.dtype,
            nbytes=2 * held * dtype_of(self.parameter_dtype).itemsize + self.group.ranks * (ids + FP32_BYTES),
            tokens=tokens,
            flops_by_convention=tuple(
                (name, tokens * training_flops_per_token(shape, seq_len=self.seq_len, convention=name))
                for name in MFU_CONVENTIONS
            ),
        )

    def memory_bytes(self) -> int | None:
        """At the peak of an eager step; a compiled one holds less."""
        return sum(self.memory_parts().values())

    def memory_parts(self) -> dict[str, int]:
        """What holds the peak's bytes: at the end of the forward pass there are no gradients, later no activations."""
        optimizer = OPTIMIZERS[self.optimizer]
        return rank_memory(
            self.shape,
            self.group,
            batch=self.batch,
            seq_len=self.seq_len,
            itemsize=dtype_of(self.parameter_dtype).itemsize,
            autocast_itemsize=dtype_of(self.dtype).itemsize if self.autocast else None,
            optimizer_states=optimizer.states,
            optimizer_temporaries=optimizer.temporaries,
            accumulate=self.accumulate,
            checkpoint=self.checkpoint,
        )

    def unsupported(self, target: Target) -> str | None:
        """Where the data type has no matrix units, or nothing can be compiled."""
        return lacks_dtype(self.dtype, target) or why_not(self.execution, target)

    def cpu_control(self) -> str | None:
        """Matmuls, and an optimizer that only moves bytes."""
        return "mixed"

    def launch(self) -> str | None:
        """As ``execution`` says."""
        return launch_of(self.execution)

    def describe(self) -> Description:
        """With the parameters of input pipeline and layout, where there are any."""
        description = {key: value for key, value in super().describe().items() if key not in ("input", "parallel")}
        if self.input is not None:
            description |= {"input_batch_s": self.input.batch_s, "input_workers": self.input.workers}
        if self.parallel is not None:
            description |= {f"parallel_{name}": value for name, value in self.parallel.describe().items()}
        return description

    def group_size(self) -> int:
        """The ranks of ``parallel``."""
        return self.group.ranks

    def build(self, device: str) -> Prepared:
        """The model with GPT-2's starting numbers, its optimizer, and the loader where there is one."""
        if self.group.ranks > 1 and device != "meta":
            return self._recipe(device).prepare(device)
        training = self.training(device)
        if self.input is None or device == "meta":
            return Prepared(
                step=training.step_on_new_tokens, check=training.check, resident_bytes=training.resident_bytes
            )
        feed = self.input.open(batch=self.batch, seq_len=self.seq_len, vocab=self.shape.vocab, device=device)
        step = partial(_fed_step, training, feed)
        # Between two blocks of a CPU the control runs, and a loader with workers gets ahead.
        runs_ahead = self.input.workers > 0 and device == "cpu"
        return Prepared(
            step=step,
            check=training.check,
            before_block=partial(feed.settle, step) if runs_ahead else None,
            reset=feed.meter.reset,
            shares=feed.shares,
            resident_bytes=training.resident_bytes,
            close=feed.close,
        )

    def _recipe(self, device: str) -> Recipe:
        """What a rank's part of the group's training is made of."""
        alone = replace(self, parallel=None)
        return Recipe(
            parallel=self.group,
            whole=Whole(shape=self.shape, dtype=torch_dtype(self.parameter_dtype), checkpoint=self.checkpoint),
            batch=self.batch,
            seq_len=self.seq_len,
            accumulate=self.accumulate,
            optimizer=self.optimizer,
            clip=self.clip,
            autocast=torch_dtype(self.dtype) if self.autocast else None,
            tolerance=TOLERANCE[self.dtype],
            routing_for=partial(self._routing, device),
            alone=lambda accumulate: replace(alone, accumulate=accumulate).training(device),
            alone_bytes=alone.memory_bytes() or 0,
            own_bytes=self.memory_bytes() or 0,
        )

    def training(self, device: str) -> Training:
        """The model, its optimizer and its first tokens on a torch device; on one rank, the work of the whole group."""
        import torch

        from perfsuite.workloads.modules.transformer import Transformer, initialize

        shape, source = self.shape, random_source(device)
        dtype = torch_dtype(self.parameter_dtype)
        model = Transformer(shape, device=device, dtype=dtype, checkpoint=self.checkpoint)
        initialize(model, SEED)
        # On meta there is no autocast, and nothing that it would change.
        narrow = torch_dtype(self.dtype) if self.autocast and device != "meta" else None
        loss_of = loss_function(model, self._routing(device, self.tokens), autocast=narrow)
        return Training(
            model=model,
            optimizer=optimizer_for(self.optimizer, model.parameters(), width=shape.d_model),
            loss_of=compiled(loss_of, device=device) if self.execution == "compile" else loss_of,
            eager_loss_of=loss_of if self.execution == "compile" else None,
            tolerance=TOLERANCE[self.dtype],
            tokens=random_integers((self.batch, self.seq_len + 1), source, low=0, high=shape.vocab, dtype=torch.int64),
            generator=source.generator,
            vocab=shape.vocab,
            accumulate=self.accumulate * self.group.data_size,
            clip=self.clip,
        )

    def _routing(self, device: str, tokens: int) -> RoutedTokens | None:
        """Of every mixture of the model."""
        shape = self.shape
        if not shape.experts:
            return None
        return prepare(Routing(tokens=tokens, experts=shape.experts, active=shape.active_experts), device)


def _check_numbers(case: TrainStep) -> None:
    """Data type, autocast and clipping, or a CaseError."""
    if case.dtype not in DTYPES:
        hint = " (fp16 needs its loss scaled, which this step does not do)" if case.dtype == "fp16" else ""
        raise CaseError(f"TrainStep: dtype={case.dtype!r} must be one of {', '.join(DTYPES)}{hint}")
    if case.autocast and case.dtype != "bf16":
        raise CaseError(f"TrainStep: dtype={case.dtype!r} must be 'bf16' with autocast=True")
    clip: object = case.clip
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < math.inf):
        raise CaseError(f"TrainStep: clip={clip!r} must be a finite number above 0, or None for no clipping")
    if case.input is not None and not isinstance(case.input, InputPipeline):
        raise CaseError(f"TrainStep: input={case.input!r} must be an InputPipeline, or None")


def _check_parallel(case: TrainStep) -> None:
    """Whether the step can be taken by a group, or a CaseError."""
    if case.parallel is None:
        return
    if not isinstance(case.parallel, Parallel):
        raise CaseError(f"TrainStep: parallel={case.parallel!r} must be a Parallel, or None")
    for name, plain in (("input", None), ("execution", "eager")):
        if case.parallel.ranks > 1 and getattr(case, name) != plain:
            raise CaseError(f"TrainStep: {name}={getattr(case, name)!r} does not go with parallel yet; leave it out")
    case.parallel.check(case.shape, model=case.model, batch=case.batch, accumulate=case.accumulate)


def _fed_step(training: Training, feed: Feed) -> torch.Tensor:
    """A step on the loader's batches, timed by its meter."""
    with feed.meter.step():
        return training.step(feed.fetch)
