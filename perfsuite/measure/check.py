"""Does a step do what its reference does, and does it yield numbers at all? Looked at before anything is timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perfsuite.workloads.base import Prepared


class NotANumberError(Exception):
    """A step's result holds NaN."""


class DisagreementError(Exception):
    """A step's result and its reference's differ."""


class NotBuiltError(Exception):
    """What ``build`` returned is no step, nor a step and its reference."""


def prepared(built: object) -> Prepared:
    """What ``build`` returned, in full; a NotBuiltError where it is none of the things that it may be."""
    if isinstance(built, Prepared):
        return built
    if callable(built):
        return Prepared(step=built)
    shown = type(built).__name__
    if isinstance(built, tuple):
        if len(built) == 2 and all(map(callable, built)):
            return Prepared(step=built[0], reference=built[1])
        shown = f"({', '.join(type(part).__name__ for part in built)})"
    raise NotBuiltError(f"build returned {shown}: return the step, or (step, reference), both callable")


def check_numbers(result: object) -> None:
    """Raise NotANumberError where any tensor, array or float in ``result`` holds NaN."""
    for place, leaf in _leaves(result, "result"):
        if _has_nan(leaf):
            raise NotANumberError(f"{place} holds NaN: the work was not done, or its inputs are wrong")


def check_agreement(result: object, reference: object, *, rtol: float | None, atol: float | None) -> None:
    """Raise DisagreementError unless both results agree.

    Tolerances left out are torch's own for the data type; beside one that is given, the other is 0.
    """
    import torch

    if rtol is not None or atol is not None:
        rtol, atol = rtol or 0.0, atol or 0.0  # assert_close wants both or neither
    try:
        ours, theirs = (_as_tensors(each, widen=rtol is not None) for each in (result, reference))
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, check_stride=False, check_device=False)
    except (AssertionError, TypeError, ValueError) as error:
        line = " ".join(part.strip() for part in str(error).splitlines() if part.strip())
        raise DisagreementError(f"the step's result is not its reference's: {line}") from None


def _as_tensors(value: object, *, widen: bool) -> Any:
    """numpy arrays and scalars as tensors, containers kept; ``widen`` makes fp32 of 8-bit floats."""
    import numpy as np
    import torch

    if isinstance(value, Mapping):
        return {key: _as_tensors(item, widen=widen) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_tensors(item, widen=widen) for item in value]
    if isinstance(value, torch.Tensor):
        # assert_close takes no tolerance for 8-bit floats, it compares their bits.
        return value.float() if widen and value.is_floating_point() and value.itemsize == 1 else value
    if value is None:
        return None
    # A copy, since torch takes no views that run backwards and warns of arrays that must not be written to.
    return torch.as_tensor(value.copy() if isinstance(value, np.ndarray) else value)


def _leaves(value: object, place: str) -> Iterator[tuple[str, object]]:
    """Every leaf of nested containers with where it stands."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{place}[{number}]")
    else:
        yield place, value


def _has_nan(leaf: object) -> bool:
    """Whether a tensor, an array or a number, real or complex, is or holds NaN."""
    import torch

    if isinstance(leaf, torch.Tensor):
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return False
        return bool(torch.isnan(leaf.float() if leaf.itemsize == 1 else leaf).any())
    if isinstance(leaf, float | complex):
        return leaf != leaf  # noqa: PLR0124 - NaN is the one number that differs from itself
    kind = getattr(getattr(leaf, "dtype", None), "kind", None)
    return kind in ("f", "c") and bool((leaf != leaf).any())  # type: ignore[attr-defined] # noqa: PLR0124 - as above
