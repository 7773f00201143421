"""One layer of a decoder-only transformer, forward or forward and backward: what a model repeats."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from perfsuite.dtypes import dtype_of
from perfsuite.errors import CaseError
from perfsuite.flops import Parts, checkpointed, layer_parts, trained
from perfsuite.footprint import LayerBytes, layer_bytes
from perfsuite.models import ModelShape, model_shape
from perfsuite.workloads.attention_kernels import NARROW, AttentionKernel
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
from perfsuite.workloads.execution import EXECUTIONS, compiled, launch_of, why_not
from perfsuite.workloads.layer_pass import SDPA_NAMES, LayerPass, recomputed
from perfsuite.workloads.routing import KINDS, Routing, prepare
from perfsuite.workloads.tensors import SEED, random_source, random_tensor, torch_dtype

DTYPES = ("fp32", "tf32", "bf16", "fp16")
TOLERANCES = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}
"""What two ways to compute a number of size 1 may differ by, some roundings in each."""
DEVIATION = 0.02
"""Of the weights, as models start with them."""

KERNELS = ("auto", *SDPA_NAMES)


def router_dtype(dtype: str) -> str | None:
    """The data type of a router's matmul beside layers in ``dtype``: fp32 where they are narrower; None for theirs."""
    return "fp32" if dtype in NARROW else None


def touched_parameters(shape: ModelShape, routing: Routing | None) -> int:
    """Parameters of one layer that its tokens are multiplied with: experts that no token goes to are not read."""
    if routing is None:
        return shape.layer_parameters()
    idle = routing.wanted.count(0)
    return shape.layer_parameters() - idle * (shape.mlp_up_weights + shape.mlp_down_weights)


@dataclass(frozen=True, kw_only=True)
class TransformerLayer(Workload):
    """One layer of the preset ``model`` on ``batch`` sequences of ``seq_len`` tokens.

    ``backward`` adds the gradients of the input and of every parameter. ``execution`` is ``eager``, ``compile`` or
    ``graph``. ``checkpoint`` keeps nothing of the forward pass and does it again in the backward pass; the peak of a
    single layer is the same, that of many is not. ``attention`` names torch's kernel, ``auto`` leaves the choice to
    torch. ``routing`` (``balanced``, the default of mixtures, or ``skewed``) and ``capacity_factor`` say which experts
    the tokens go to; dropped tokens do not count.
    """

    kind = "transformer_layer"
    metric = "mfu"

    model: str
    batch: int
    seq_len: int
    backward: bool = False
    execution: str = "eager"
    checkpoint: bool = False
    attention: str = "auto"
    routing: str | None = None
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        model_shape(self.model)
        for name in ("batch", "seq_len"):
            positive_int("TransformerLayer", name, getattr(self, name))
        for name in ("backward", "checkpoint"):
            true_or_false("TransformerLayer", name, getattr(self, name))
        one_of("TransformerLayer", "execution", self.execution, EXECUTIONS)
        one_of("TransformerLayer", "attention", self.attention, KERNELS)
        one_of("TransformerLayer", "dtype", self.dtype, DTYPES)
        if self.checkpoint and not self.backward:
            raise CaseError("TransformerLayer: checkpoint=True needs backward=True: without it nothing is kept")
        self._check_routing()

    def _check_routing(self) -> None:
        if self.routing is not None:
            one_of("TransformerLayer", "routing", self.routing, KINDS)
        for name in ("routing", "capacity_factor"):
            if not self.shape.experts and getattr(self, name) is not None:
                raise CaseError(
                    f"TransformerLayer: {name}={getattr(self, name)!r} needs experts, and {self.model} has none; "
                    "leave it out"
                )
        self._routing()  # says what is wrong with the capacity factor

    @cached_property
    def shape(self) -> ModelShape:
        """The preset with this one layer."""
        return model_shape(self.model, layers=1)

    @cached_property
    def routed(self) -> Routing | None:
        """Which experts the tokens go to; None in a dense model."""
        return self._routing()

    def _routing(self) -> Routing | None:
        if not self.shape.experts:
            return None
        return Routing(
            tokens=self.tokens,
            experts=self.shape.experts,
            active=self.shape.active_experts,
            kind=self.routing or "balanced",
            capacity_factor=self.capacity_factor,
        )

    @property
    def tokens(self) -> int:
        """Tokens that one step goes through."""
        return self.batch * self.seq_len

    @property
    def kernel(self) -> AttentionKernel:
        """torch's attention kernel for these shapes."""
        return AttentionKernel(
            backend=self.attention,
            dtype=self.dtype,
            head_dim=self.shape.head_dim,
            q_len=self.seq_len,
            kv_len=self.seq_len,
            grouped=self.shape.kv_heads != self.shape.heads,
            masked=self.seq_len > 1,
            backward=self.backward,
        )

    def parts(self) -> Parts:
        """The layer's matmuls; the router's are fp32 beside bf16 and fp16, and so are the math kernel's."""
        parts = layer_parts(
            self.shape,
            batch=self.batch,
            q_len=self.seq_len,
            routed=self.routed.kept if self.routed else None,
            router_dtype=router_dtype(self.dtype),
        )
        if self.attention == "math" and self.dtype in NARROW:
            parts = tuple(replace(part, dtype="fp32") if part.name == "attention" else part for part in parts)
        if self.checkpoint:
            parts = checkpointed(parts)
        return trained(parts) if self.backward else parts

    def work(self) -> Work:
        """Parameters and input read once, output written once; backward the gradients of all three as well.

        An expert that no token goes to is neither read nor given a gradient.
        """
        once = touched_parameters(self.shape, self.routed) + 2 * self.tokens * self.shape.d_model
        nbytes = (2 if self.backward else 1) * once * dtype_of(self.dtype).itemsize
        return work_of_parts(self.parts(), dtype=self.dtype, nbytes=nbytes, tokens=self.tokens)

    def memory_bytes(self) -> int | None:
        """Parameters, gradients, activations, input and output."""
        return sum(self.memory_parts().values())

    def memory_parts(self) -> dict[str, int]:
        """Bytes by what holds them at the peak: the forward pass's, or the largest moment of the backward pass."""
        itemsize = dtype_of(self.dtype).itemsize
        stream = self.tokens * self.shape.d_model * itemsize
        parameters = self.shape.layer_parameters() * itemsize
        if not self.backward:
            return {
                "parameters": parameters,
                "activations": self._layer_bytes().forward_peak(),
                "input and output": stream,
            }
        gradients, activations = max(self._moments(stream), key=sum)
        return {
            "parameters": parameters,
            "gradients": gradients,
            "activations": activations,
            "input and output": 3 * stream,  # the input, the output and its gradient
        }

    def _moments(self, stream: int) -> list[tuple[int, int]]:
        """Bytes of gradients and of activations as the backward pass begins, after its MLP, and at its end.

        Where attention is not fused, there too. Gradients come while activations go; ``stream`` is the size of the
        layer's input.
        """
        shape, itemsize = self.shape, dtype_of(self.dtype).itemsize
        inner = (self._most_pairs() or self.tokens) * shape.d_ff * itemsize
        experts, ways_up = shape.experts or 1, 2 if shape.gated else 1
        mlp = experts * (shape.mlp_up_weights + shape.mlp_down_weights) * itemsize
        layer = self._layer_bytes()
        kept = layer.kept() - stream
        moments = [
            (0, kept + ways_up * inner // experts + 2 * stream),
            (mlp, kept - 2 * ways_up * inner + 2 * stream),
            (shape.layer_parameters() * itemsize, 2 * stream),
        ]
        if not layer.fused_attention:
            moments.append((mlp + shape.out_weights * itemsize, layer.attention_backward_peak() - stream))
        return moments

    def _layer_bytes(self) -> LayerBytes:
        return layer_bytes(
            self.shape,
            batch=self.batch,
            seq_len=self.seq_len,
            itemsize=dtype_of(self.dtype).itemsize,
            autocast=False,
            fused_norm=True,
            attention="math" if self.attention == "math" else "fused",
            routed=self._most_pairs(),
        )

    def _most_pairs(self) -> int | None:
        """The (token, expert) pairs that may be computed, without a look at every token: memory is asked for often."""
        routed = self.routed
        return min(routed.tokens * routed.active, routed.experts * routed.capacity) if routed else None

    @property
    def rtol(self) -> float:
        """Relative tolerance between two ways to run the layer."""
        return TOLERANCES[self.dtype]

    @property
    def atol(self) -> float:
        """Absolute tolerance: the MLP makes its input of size 1 this many times larger."""
        growth = DEVIATION**2 * math.sqrt(self.shape.d_model * self.shape.d_ff)
        return TOLERANCES[self.dtype] * (1 + growth)

    def unsupported(self, target: Target) -> str | None:
        """Where the data type, the attention kernel or the way to run it is missing."""
        return lacks_dtype(self.dtype, target) or self.kernel.refuses(target) or why_not(self.execution, target)

    def cpu_control(self) -> str | None:
        """Matmuls are most of its time."""
        return "matmul"

    def launch(self) -> str | None:
        """As ``execution`` says."""
        return launch_of(self.execution)

    def describe(self) -> Description:
        """The fields, with the routing that a mixture has where none is given."""
        return {**super().describe(), "routing": self.routed.kind if self.routed else None}

    def build(self, device: str) -> Prepared:
        """The layer with GPT-2's starting weights on random numbers; its reference is the same layer, run plainly."""
        plain = self._plain(device)
        block = recomputed(plain.block) if self.checkpoint else plain.block
        if self.execution == "compile":
            block = compiled(block, device=device)
        backend = None if device == "meta" else SDPA_NAMES.get(self.attention)  # meta has no kernels to choose from
        step = replace(plain, block=block, backend=backend)
        same = block is plain.block and backend is None
        return Prepared(step=step.run, reference=None if same else plain.run, resident_bytes=plain.resident_bytes)

    def _plain(self, device: str) -> LayerPass:
        """The module and its inputs."""
        from perfsuite.workloads.modules.layers import Block, rotation_for
        from perfsuite.workloads.modules.transformer import initialize

        dtype = torch_dtype(self.dtype)
        block = Block(self.shape, device=device, dtype=dtype).requires_grad_(self.backward)
        initialize(block, SEED)
        source, size = random_source(device), (self.batch, self.seq_len, self.shape.d_model)
        rotation = None
        if self.shape.gated:
            rotation = rotation_for(self.shape, positions=range(self.seq_len), device=device, dtype=dtype)
        return LayerPass(
            block=block,
            x=random_tensor(size, self.dtype, source).requires_grad_(self.backward),
            gradient=random_tensor(size, self.dtype, source) if self.backward else None,
            parameters=tuple(block.parameters()),
            rotation=rotation,
            routing=prepare(self.routed, device) if self.routed else None,
        )
