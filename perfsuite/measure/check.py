"""Does a step do what its reference does, and does it yield numbers at all? Looked at before anything is timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class NotANumberError(Exception):
    """A step's result holds NaN."""


class DisagreementError(Exception):
    """A step's result and its reference's differ."""


def check_numbers(result: object) -> None:
    """Raise NotANumberError where any tensor, array or float in ``result`` holds NaN."""
    for place, leaf in _leaves(result, "result"):
        if _has_nan(leaf):
            raise NotANumberError(f"{place} holds NaN: the work was not done, or its inputs are wrong")


def check_agreement(result: object, reference: object, *, rtol: float | None, atol: float | None) -> None:
    """Raise DisagreementError unless both results agree; tolerances left out are torch's own for the data type."""
    import torch

    try:
        torch.testing.assert_close(_as_tensors(result), _as_tensors(reference), **_tolerances(result, rtol, atol))
    except (AssertionError, TypeError, ValueError) as error:
        line = " ".join(part.strip() for part in str(error).splitlines() if part.strip())
        raise DisagreementError(f"the step's result is not its reference's: {line}") from None


def _tolerances(result: object, rtol: float | None, atol: float | None) -> dict[str, Any]:
    """assert_close wants both or neither: one that is left out takes the other's meaning or 0."""
    del result
    chosen: dict[str, Any] = {"check_stride": False, "check_device": False}
    if rtol is None and atol is None:
        return chosen
    return {**chosen, "rtol": rtol or 0.0, "atol": atol or 0.0}


def _as_tensors(value: object) -> Any:
    """numpy arrays and scalars as tensors, containers kept."""
    import torch

    if isinstance(value, torch.Tensor) or value is None:
        return value
    if isinstance(value, Mapping):
        return {key: _as_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_tensors(item) for item in value]
    return torch.as_tensor(value)


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
    """Whether a tensor, an array or a float is or holds NaN."""
    import torch

    if isinstance(leaf, torch.Tensor):
        return leaf.is_floating_point() and bool(torch.isnan(leaf.float() if leaf.itemsize == 1 else leaf).any())
    if isinstance(leaf, float):
        return leaf != leaf  # noqa: PLR0124 - NaN is the one number that differs from itself
    kind = getattr(getattr(leaf, "dtype", None), "kind", None)
    return kind == "f" and bool((leaf != leaf).any())  # type: ignore[attr-defined] # noqa: PLR0124 - as above
