"""Memory of one rank of a parallel training step by formula: what it holds of the model, and what passes through."""

from __future__ import annotations

from dataclasses import dataclass, replace

from perfsuite.footprint import INDEX_BYTES, LayerBytes, Moment, layer_bytes, training_moments
from perfsuite.models import ModelShape
from perfsuite.workloads.parallel import Parallel

UNSHARDED_BLOCKS = 2
"""FSDP2 gathers the next block while it computes one."""


def group_parameters(shape: ModelShape, parallel: Parallel) -> int:
    """The parameters that all ranks hold together, copies counted as often as there are."""
    replica = parallel.tensor * parallel.local_shape(shape).parameters()
    return replica * parallel.data_size // parallel.shards


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's part of a step; ``itemsize`` is that of parameters, gradients and optimizer state.

    ``shape`` is what a tensor-parallel rank has of the model, ``layer`` one of its layers on a micro-batch.
    """

    shape: ModelShape
    parallel: Parallel
    layer: LayerBytes
    itemsize: int
    optimizer_states: int
    optimizer_temporaries: int
    accumulate: int
    checkpoint: bool

    def parts(self) -> dict[str, int]:
        """By what holds the bytes at the peak."""
        if self.parallel.pipeline > 1:
            stages = range(self.parallel.pipeline)
            return max((self._stage(stage) for stage in stages), key=lambda parts: sum(parts.values()))
        return self._sharded() if self.parallel.shards > 1 else self._whole()

    @property
    def _full(self) -> int:
        return self.shape.parameters() * self.itemsize

    def _moments(self) -> list[Moment]:
        """DDP's buckets hold the gradients from the first step on, as earlier micro-batches' would."""
        accumulate = max(self.accumulate, 2) if self.parallel.replicates else self.accumulate
        return training_moments(self.layer, itemsize=self.itemsize, accumulate=accumulate, checkpoint=self.checkpoint)

    def _parts(self, parameters: int, moments: list[Moment], **more: int) -> dict[str, int]:
        """Those of the largest moment, the optimizer's step among them."""
        step = Moment(gradients=parameters, activations=0, temporaries=self.optimizer_temporaries * parameters)
        peak = max(*moments, step, key=lambda moment: moment.total)
        return {
            "parameters": parameters,
            "gradients": peak.gradients,
            "optimizer_state": self.optimizer_states * parameters,
            "activations": peak.activations,
            "temporaries": peak.temporaries,
            **more,
        }

    def _whole(self) -> dict[str, int]:
        # Gradients that are not exchanged yet lie beside the buckets.
        unsent = self._full if self.parallel.replicates and self.parallel.sync_every > 1 else 0
        return self._parts(self._full, [replace(each, temporaries=unsent) for each in self._moments()])

    def _sharded(self) -> dict[str, int]:
        """FSDP2: shares of everything, beside blocks and tables that are gathered, and gradients not yet divided."""
        shards = self.parallel.shards
        block = self.shape.layer_parameters() * self.itemsize
        tables = self._full - self.shape.layers * block
        gathered = tables + min(UNSHARDED_BLOCKS, self.shape.layers) * block
        if self.parallel.sync_every > 1:
            moments = self._moments()  # gradients stay whole until they are exchanged
        else:
            moments = [
                replace(each, gradients=-(-each.gradients // shards) + min(each.gradients, tables + block))
                for each in self._moments()
            ]
        # The tables stay gathered from the forward pass on until the backward pass is over.
        moments = [replace(each, temporaries=gathered) for each in moments]
        return self._parts(-(-self._full // shards), moments)

    def _stage(self, stage: int) -> dict[str, int]:
        """A pipeline's stage: its layers and tables, and the micro-batches that it has seen but not yet gone back."""
        parallel, layer = self.parallel, self.layer
        layers = len(parallel.stage_layers(self.shape)[stage])
        first, last = stage == 0, stage == parallel.pipeline - 1
        tables = self.shape.head_weights * (first + last) + self.shape.d_model * last
        parameters = (layers * self.shape.layer_parameters() + tables) * self.itemsize
        in_flight = parallel.chunks if parallel.schedule == "gpipe" else min(parallel.chunks, parallel.pipeline - stage)
        kept = layers * (layer.input_bytes if self.checkpoint else layer.kept())
        head, logits = (layer.head() + layer.logits_bytes, layer.logits_bytes) if last else (0, 0)
        again = layer.kept() - layer.input_bytes if self.checkpoint else 0
        held = parameters if parallel.replicates else 0
        # With more micro-batches than are in flight, another forward pass begins when all gradients are there.
        later = parameters if in_flight < parallel.chunks else held
        moments = [
            Moment(gradients=later, activations=in_flight * (kept + head) + 2 * logits),
            Moment(gradients=parameters, activations=in_flight * (kept + head) + again + layer.backward_peak()),
        ]
        # DDP exchanges with the last micro-batch; until then the gradients lie beside its buckets.
        unsent = held if parallel.chunks > 1 else 0
        moments = [replace(each, temporaries=unsent) for each in moments]
        received = parallel.chunks * layer.input_bytes * ((not first) + (not last))
        return self._parts(parameters, moments, received=received)


def rank_memory(
    shape: ModelShape,
    parallel: Parallel,
    *,
    batch: int,
    seq_len: int,
    itemsize: int,
    autocast_itemsize: int | None,
    optimizer_states: int,
    optimizer_temporaries: int,
    accumulate: int,
    checkpoint: bool,
) -> dict[str, int]:
    """Bytes of a step at the peak of one rank, the largest of a pipeline's, by what holds them.

    As `footprint.training_memory`, which this is for one rank. DDP holds the gradients in its buckets all the time.
    FSDP2 divides parameters, gradients and optimizer state, and gathers tables and two blocks. Tensor-parallel ranks
    have whole heads and parts of MLP and vocabulary, and the whole residual stream. A pipeline's stage has its layers
    and the micro-batches that are in flight.
    """
    local = parallel.local_shape(shape)
    layer = layer_bytes(
        local,
        batch=batch // parallel.chunks,
        seq_len=seq_len,
        itemsize=autocast_itemsize or itemsize,
        autocast=autocast_itemsize is not None,
        fused_norm=True,
    )
    memory = RankMemory(
        shape=local,
        parallel=parallel,
        layer=layer,
        itemsize=itemsize,
        optimizer_states=optimizer_states,
        optimizer_temporaries=optimizer_temporaries,
        accumulate=accumulate,
        checkpoint=checkpoint,
    )
    routing = 2 * batch * seq_len * shape.active_experts
    return {**memory.parts(), "inputs": (batch * (seq_len + 1) + routing) * INDEX_BYTES}
