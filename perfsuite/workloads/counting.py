"""FLOPs of a step that nobody declared: counted once, operator by operator, none passed over in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perfsuite.errors import UncountableError
from perfsuite.flops import attention_flops, matmul_flops
from perfsuite.workloads.base import Step
from perfsuite.workloads.free_operators import computes, is_free

Shape = tuple[int, ...]
Formula = Callable[..., int]


def count_flops(step: Step) -> int:
    """The FLOPs of one run of ``step``, by the formulas of torch's flop counter and those below.

    A causal mask is not looked at: attention counts in full, and fused attention recomputes in its backward pass.
    An UncountableError names every operator that has no formula and is not known to be free of FLOPs. Operators that
    bypass torch (a Triton kernel launched directly, numpy) cannot be seen; a step of nothing else is an error too.
    """
    counter = _counter_type()(_formulas())
    with counter:
        step()
    if counter.unknown:
        names = ", ".join(sorted(counter.unknown))
        raise UncountableError(f"no FLOP formula for {names}; give flops= in the Kernel")
    if not counter.computed:
        raise UncountableError("the step ran no torch operator that computes; give flops= in the Kernel")
    return int(counter.flops)


def _formulas() -> Mapping[Any, Formula]:
    """The counter's registry, with formulas for operators on which it says 0."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    aten = torch.ops.aten
    # Asked for by name, since not every version of torch has every operator.
    own = {getattr(aten, name): formula for name, formula in OWN_FORMULAS.items() if hasattr(aten, name)}
    return FlopCounterMode(display=False, custom_mapping=own).flop_registry


def _counter_type() -> type[Any]:
    """The dispatch mode; made here because its base class needs torch."""
    from torch.utils._python_dispatch import TorchDispatchMode  # underscored, but the documented way in

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
        """Runs every operator, adds up ``flops``, and keeps the names of those ``unknown``."""

        supports_higher_order_operators = True

        def __init__(self, formulas: Mapping[Any, Formula]) -> None:
            super().__init__()  # type: ignore[no-untyped-call] # as above
            self.formulas = formulas
            self.flops = 0
            self.unknown: set[str] = set()
            self.computed = False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            higher_order = not hasattr(func, "overloadpacket")
            key = func if higher_order else func.overloadpacket
            formula = self.formulas.get(key)
            if formula is None and not higher_order:
                with self:
                    parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
            out = func(*args, **kwargs)
            if formula is not None:
                self.flops += formula(*args, **kwargs, out_val=out)
            elif higher_order or not is_free(func):
                self.unknown.add(str(func))
            self.computed |= higher_order or computes(func)
            return out

    return Counter


def _mm(a: Shape, b: Shape, *_rest: Any, **_named: Any) -> int:
    return matmul_flops(m=a[-2], n=b[-1], k=a[-1])


def _addmm(_bias: Shape, a: Shape, b: Shape, *_rest: Any, **_named: Any) -> int:
    return _mm(a, b)


def _mv(matrix: Shape, _vector: Shape, *_rest: Any, **_named: Any) -> int:
    return matmul_flops(m=matrix[0], n=1, k=matrix[1])


def _addmv(_bias: Shape, matrix: Shape, vector: Shape, *_rest: Any, **_named: Any) -> int:
    return _mv(matrix, vector)


def _dot(a: Shape, _b: Shape, *_rest: Any, **_named: Any) -> int:
    return matmul_flops(m=1, n=1, k=a[0])


def _sdpa(query: Shape, key: Shape, value: Shape, *_rest: Any, **_named: Any) -> int:
    """Two matmuls over every (query, key) pair, as the counter has it for fused kernels."""
    batch, heads, q_len, head_dim = query
    return attention_flops(
        batch=batch,
        heads=heads,
        q_len=q_len,
        kv_len=key[-2],
        head_dim=head_dim,
        value_dim=value[-1],
        causal=False,
    )


def _sdpa_backward(_grad: Shape, query: Shape, key: Shape, value: Shape, *_rest: Any, **_named: Any) -> int:
    """Five matmuls: the scores again, and the gradients of scores, query, key and value."""
    scores = matmul_flops(m=query[-2], n=key[-2], k=query[-1], batch=query[0] * query[1])
    return 2 * _sdpa(query, key, value) + scores


OWN_FORMULAS: dict[str, Formula] = {
    "mv": _mv,
    "addmv": _addmv,
    "dot": _dot,
    "vdot": _dot,
    "_int_mm": _mm,
    "_scaled_mm_v2": _mm,
    "_addmm_activation": _addmm,
    "_scaled_dot_product_flash_attention_for_cpu": _sdpa,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_backward,
}
