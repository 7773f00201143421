"""What a case sets for its whole process is put back after it, so that the next case starts as it did."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.measure.precision import matmul_precision

_FLAGS = (
    "cudnn.allow_tf32",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cuda.matmul.allow_fp16_accumulation",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
)
"""Attributes below ``torch.backends``; some came with later releases."""


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """One thing of the process: how it is read, and how it is set."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


@contextmanager
def isolation() -> Iterator[None]:
    """Put back threads, default data type and device, gradients, determinism, precision, folder and Python's clock."""
    before = [(setting, setting.read()) for setting in _settings()]
    try:
        yield
    finally:
        for setting, value in before:
            if setting.read() != value:
                setting.write(value)
        _leave_default_device()


def _settings() -> list[_Setting]:
    """Everything that is put back but the default device, in this order."""
    import torch

    flags = [flag for path in _FLAGS if (flag := _flag(path)) is not None]
    return [
        *flags,
        _Setting(read=matmul_precision, write=torch.set_float32_matmul_precision),
        _Setting(read=torch.get_num_threads, write=torch.set_num_threads),
        _Setting(read=torch.get_default_dtype, write=torch.set_default_dtype),
        _Setting(read=torch.get_default_device, write=torch.set_default_device),
        _Setting(read=torch.is_grad_enabled, write=torch.set_grad_enabled),
        _Setting(read=_determinism, write=_set_determinism),
        _Setting(read=_folder, write=_enter_folder),
        _Setting(read=lambda: time.perf_counter_ns, write=lambda clock: setattr(time, "perf_counter_ns", clock)),
    ]


def _flag(path: str) -> _Setting | None:
    """A flag of ``torch.backends``; None where this release has no such flag."""
    import torch

    owner: Any = torch.backends
    *parts, name = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    if not hasattr(owner, name):
        return None
    return _Setting(read=lambda: getattr(owner, name), write=lambda value: setattr(owner, name, value))


def _leave_default_device() -> None:
    """Take off a default of ``cpu`` that was set by name: it says nothing, and costs every call of torch time."""
    import torch

    if torch.get_default_device() == torch.device("cpu"):
        torch.set_default_device(None)


def _determinism() -> tuple[bool, bool]:
    """Whether deterministic algorithms are asked for, and whether their absence is only warned of."""
    import torch

    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(value: tuple[bool, bool]) -> None:
    import torch

    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _folder() -> str | None:
    """The current folder; None where it is gone."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return None


def _enter_folder(folder: str | None) -> None:
    """Go back, where there is something to go back to."""
    if folder is not None:
        os.chdir(folder)
