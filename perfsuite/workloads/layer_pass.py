"""A layer and its inputs as one step: forward, or forward and backward, by the attention kernel that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from perfsuite.workloads.modules.layers import Rotation
    from perfsuite.workloads.routing import RoutedTokens

SDPA_NAMES = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
    "cudnn": "CUDNN_ATTENTION",
}


@dataclass(frozen=True, kw_only=True)
class LayerPass:
    """A layer, however it is called, with its inputs; ``gradient`` is the output's where there is a backward pass."""

    block: Callable[..., Any]
    x: Tensor
    gradient: Tensor | None
    parameters: tuple[Tensor, ...]
    rotation: Rotation | None
    routing: RoutedTokens | None
    backend: str | None = None

    def run(self) -> Any:
        """The output, and with a backward pass the input's gradient; the parameters' are computed and dropped."""
        import torch

        with self._held():
            y = self.block(self.x, rotation=self.rotation, routing=self.routing)
            if self.gradient is None:
                return y
            # An expert that no token goes to has no gradient.
            wanted = (self.x, *self.parameters)
            gradients = torch.autograd.grad(y, wanted, self.gradient, allow_unused=True)
        return y.detach(), gradients[0]

    def _held(self) -> AbstractContextManager[None]:
        """torch held to one attention kernel, in the backward pass too, where checkpoints choose again."""
        if self.backend is None:
            return nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, self.backend))

    def resident_bytes(self) -> int:
        """What is there between two steps."""
        held = [self.x, *self.parameters]
        if self.gradient is not None:
            held.append(self.gradient)
        if self.rotation is not None:
            held += [self.rotation.cos, self.rotation.sin]
        if self.routing is not None:
            held += [self.routing.chosen, *self.routing.tokens, *self.routing.pairs]
        return sum(tensor.nbytes for tensor in held)


def recomputed(block: Callable[..., Any]) -> Callable[..., Any]:
    """The layer with nothing kept between its passes; no generator's state is, as it draws no numbers."""
    from torch.utils.checkpoint import checkpoint

    return partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
