"""Small layers and models with numbers, and how their results are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from perfsuite.models import ModelShape, model_shape
from perfsuite.workloads.modules.layers import Block, Rotation, rotation_for
from perfsuite.workloads.modules.transformer import Transformer
from perfsuite.workloads.routing import Routing

BATCH = 2
Q_LEN = 12
TINY = ("tiny-gpt", "tiny-llama", "tiny-moe")
ROUTING = Routing(tokens=BATCH * Q_LEN, experts=4, active=2, kind="skewed")


@contextmanager
def one_thread() -> Iterator[None]:
    """These tensors are too small to share: on a busy machine the threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def numbers(*sizes: int, seed: int = 1) -> Tensor:
    """Normal numbers."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def some_inputs(shape: ModelShape) -> Tensor:
    """What a layer is given: small enough for a norm's epsilon to show."""
    return (0.1 * numbers(BATCH, Q_LEN, shape.d_model)).requires_grad_()


def some_tokens(shape: ModelShape) -> Tensor:
    """Token ids, (batch, q_len)."""
    return torch.randint(shape.vocab, (BATCH, Q_LEN), generator=torch.Generator().manual_seed(1))


def stir(module: nn.Module) -> None:
    """Numbers with which every parameter matters: biases are not 0, gains not 1, and maps keep the size of a vector."""
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=source)
            else:
                parameter.uniform_(0.5, 1.5, generator=source)


def stirred_block(name: str) -> Block:
    """A layer of a model, with numbers."""
    block = Block(model_shape(name), device="cpu", dtype=torch.float32)
    stir(block)
    return block


def stirred_model(name: str, *, checkpoint: bool = False) -> Transformer:
    """A model with numbers."""
    model = Transformer(model_shape(name), device="cpu", dtype=torch.float32, checkpoint=checkpoint)
    stir(model)
    return model


def rotation(shape: ModelShape) -> Rotation | None:
    """The rotation of a whole sequence, for models that have one."""
    if not shape.gated:
        return None
    return rotation_for(shape, positions=range(Q_LEN), device="cpu", dtype=torch.float32)


def gradients(out: Tensor, inputs: Iterable[Tensor]) -> list[Tensor]:
    """The output, and the gradients of its product with fixed random numbers."""
    return [out, *torch.autograd.grad(out, list(inputs), numbers(*out.shape, seed=2).to(out.dtype))]


def assert_alike(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Each tensor equal to 1e-5 of its largest number."""
    for our, their in zip(ours, theirs, strict=True):
        error = (our - their).abs().max() / their.abs().max()
        assert error.item() <= 1e-5
