"""The optimizers of training steps: what they hold in memory, and rates at which a loss falls at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HIGHEST_RATE = 1e-3
RATE_TIMES_WIDTH = 0.2
"""AdamW moves every weight by its rate, so that a layer's output moves by the rate times its width."""
SGD_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """``states`` tensors are kept for each parameter, and ``temporaries`` more held during a step on a GPU.

    There torch's AdamW works through all parameters at once (``foreach``) and holds the roots of the second moments.
    """

    states: int
    temporaries: int = 0


OPTIMIZERS = {
    "adamw": OptimizerKind(states=2, temporaries=1),
    "adamw_fused": OptimizerKind(states=2),
    "sgd": OptimizerKind(states=0),
}


def optimizer_for(name: str, parameters: Iterable[torch.nn.Parameter], *, width: int) -> torch.optim.Optimizer:
    """The optimizer called ``name`` for a model of ``width``, in torch's own form for the device unless it is fused.

    Fused AdamW has no form for ``meta``, where the plain one stands in.
    """
    import torch

    parameters = list(parameters)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=SGD_RATE)
    fused = name == "adamw_fused" and not parameters[0].is_meta
    return torch.optim.AdamW(parameters, lr=min(HIGHEST_RATE, RATE_TIMES_WIDTH / width), fused=fused or None)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the optimizer's state holds now; it comes into being in the first step."""
    return sum(each.nbytes for each in state_tensors(optimizer))


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of its state."""
    import torch

    tensors = (value for state in optimizer.state.values() for value in state.values())
    return [each for each in tensors if isinstance(each, torch.Tensor)]
