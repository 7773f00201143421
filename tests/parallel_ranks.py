"""What the ranks of `test_parallel` do: ``python -m tests.parallel_ranks RANK RANKS FOLDER`` runs every layout once.

Each rank writes what it found to a JSON file of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsuite.workloads.parallel import Parallel
from perfsuite.workloads.train_step import TrainStep

if TYPE_CHECKING:
    import torch

    from perfsuite.workloads.parallel_training import ParallelTraining

STEPS = 3
MIXED = {"dtype": "bf16", "autocast": True}


def tiny(parallel: Parallel, **changes: Any) -> TrainStep:
    """A step of which every number counts: by plain gradient descent, clipped, a wrong norm shows in the next loss."""
    return TrainStep(
        **{"model": "tiny-llama", "batch": 4, "seq_len": 16, "optimizer": "sgd", "clip": 0.5, **changes},
        parallel=parallel,
    )


def layouts(ranks: int) -> dict[str, TrainStep]:
    """Those that two ranks try, or four."""
    if ranks == 4:
        return {
            "ddp-tensor": tiny(Parallel(ranks=4, data="ddp", tensor=2)),
            "fsdp2-tensor": tiny(Parallel(ranks=4, data="fsdp2", tensor=2), optimizer="adamw"),
            "ddp-pipeline": tiny(Parallel(ranks=4, data="ddp", pipeline=2)),
            "pipeline-4": tiny(Parallel(ranks=4, pipeline=4), layers=5),
        }
    ddp, fsdp2 = Parallel(ranks=2, data="ddp"), Parallel(ranks=2, data="fsdp2")
    tensor, pipeline = Parallel(ranks=2, tensor=2), Parallel(ranks=2, pipeline=2)
    gpipe = replace(pipeline, schedule="gpipe", microbatches=4)
    return {
        "ddp": tiny(ddp),
        "ddp-sync-every-2": tiny(replace(ddp, sync_every=2, bucket_mib=0.1), model="tiny-gpt", accumulate=4),
        "ddp-adamw": tiny(ddp, optimizer="adamw_fused", checkpoint=True),
        "ddp-moe": tiny(ddp, model="tiny-moe"),
        "fsdp2": tiny(fsdp2, optimizer="adamw"),
        "fsdp2-sync-every-2": tiny(replace(fsdp2, sync_every=2), accumulate=2, model="tiny-gpt", checkpoint=True),
        "fsdp2-mixed": tiny(fsdp2, **MIXED, batch=2),
        "tensor": tiny(tensor, optimizer="adamw"),
        "tensor-mixed": tiny(tensor, **MIXED, batch=2, checkpoint=True),
        "tensor-moe": tiny(tensor, model="tiny-moe"),
        "gpipe": tiny(gpipe, layers=3),
        "1f1b": tiny(pipeline, optimizer="adamw", checkpoint=True),
        "pipeline-mixed": tiny(pipeline, **MIXED, batch=2),
        "pipeline-moe": tiny(gpipe, model="tiny-moe"),
    }


def batches(case: TrainStep, replicas: int) -> list[torch.Tensor]:
    """Every micro-batch of the group, (batch, seq_len + 1) each."""
    import torch

    source = torch.Generator().manual_seed(5)
    size = (case.batch, case.seq_len + 1)
    return [torch.randint(64, size, generator=source) for _ in range(replicas * case.accumulate)]


def _training(case: TrainStep) -> ParallelTraining:
    from perfsuite.workloads.parallel_training import ParallelTraining

    found = case.build("cpu").check.__self__  # type: ignore[union-attr] # a bound method
    assert isinstance(found, ParallelTraining)
    return found


def _losses(case: TrainStep) -> list[float]:
    """The group's mean loss of each of three steps."""
    training, count = _training(case), case.accumulate
    place = training.layout.place("data")
    mine = batches(case, case.group.data_size)[place * count : (place + 1) * count]
    return [training.layout.mean(float(training.step(iter(mine).__next__))) for _ in range(STEPS)]


def _found(case: TrainStep) -> dict[str, Any]:
    """What the harness sees of a layout, and what its tensors hold."""
    from perfsuite.measure.memory import peak_memory_bytes
    from perfsuite.workloads.layout import local_tensors
    from perfsuite.workloads.optimizers import state_tensors

    losses, built = _losses(case), case.build("cpu")
    assert built.check is not None
    assert built.reset is not None
    assert built.shares is not None
    assert built.resident_bytes is not None
    training: ParallelTraining = built.check.__self__  # type: ignore[attr-defined] # a bound method
    built.step()  # the harness looks for NaN first
    reason = built.check()
    built.reset()
    early = built.shares()
    built.step()
    states = [each for each in local_tensors(state_tensors(training.optimizer)) if each.ndim]
    return {
        "losses": losses,
        "reason": reason,
        "early": early,
        "shares": built.shares(),
        "alone": float(built.alone()) if built.alone else None,
        "alone_share": built.alone_share,
        "peak": (peak_memory_bytes(built.step, "cpu") or 0) + built.resident_bytes(),
        "parameters": sum(each.nbytes for each in local_tensors(training.model.parameters())),
        "states": sum(each.nbytes for each in states),
    }


def _other_weights(training: ParallelTraining) -> None:
    """The last rank begins with weights of its own."""
    import torch
    from torch import distributed

    if distributed.get_rank() == distributed.get_world_size() - 1:
        with torch.no_grad():
            for each in training.model.parameters():
                each.mul_(1.5)


def _never_exchanged(training: ParallelTraining) -> None:
    """Gradients stay where they are."""
    passes = training.passes
    object.__setattr__(
        training, "passes", lambda tokens, *, accumulate, last: passes(tokens, accumulate=accumulate, last=False)
    )


def _own_norm(training: ParallelTraining) -> None:
    """Every rank clips by the norm of its own part."""
    object.__setattr__(training.layout, "norm_groups", lambda: iter(()))


FAULTS: dict[str, tuple[str, Callable[[ParallelTraining], None]]] = {
    "ddp other weights": ("ddp", _other_weights),
    "ddp never exchanged": ("ddp", _never_exchanged),
    "fsdp2 other weights": ("fsdp2", _other_weights),
    "tensor other weights": ("tensor", _other_weights),
    "tensor own norm": ("tensor-moe", _own_norm),
    "pipeline other weights": ("gpipe", _other_weights),
    "pipeline own norm": ("gpipe", _own_norm),
}


def _reason(layout: str, spoil: Callable[[ParallelTraining], None]) -> str | None:
    """What the check says of a training that is spoilt."""
    training = _training(layouts(2)[layout])
    spoil(training)
    return training.check()


def _refusal() -> str | None:
    """What is said where the group has another size."""
    from perfsuite.errors import CaseError

    try:
        tiny(Parallel(ranks=3, data="ddp")).build("cpu")
    except CaseError as error:
        return str(error)
    return None


def main(rank: int, ranks: int, folder: Path) -> None:
    """All of it, on Gloo."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store{ranks}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    found: dict[str, Any] = {"layouts": {name: _found(case) for name, case in layouts(ranks).items()}}
    if ranks == 2:
        found["faults"] = {name: _reason(*fault) for name, fault in FAULTS.items()}
        found["refusal"] = _refusal()
    (folder / f"rank{rank}of{ranks}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
