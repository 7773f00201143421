"""The versions that a worker measures with, for records and baselines: no host, user or path among them."""

from __future__ import annotations

import importlib.metadata
import platform


def environment() -> dict[str, str | None]:
    """Versions by name; None for what is not here."""
    import torch

    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": _cudnn(),
        "nccl": _nccl(),
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "python": platform.python_version(),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cudnn() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call] # torch leaves it untyped
    return str(version) if version else None


def _nccl() -> str | None:
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return None
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call] # torch leaves it untyped
    return ".".join(str(part) for part in version)
