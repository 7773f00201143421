"""Control kernels from libraries other than torch, timed in alternation with a case on a CPU."""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Step = Callable[[], Any]

SMALLEST_GEMM, LARGEST_GEMM = 64, 1024
SMALL_FLOPS = 2 * 256**3
"""The GEMM beside a case that has no FLOPs of its own to size it by."""
CHAIN_LENGTH = 10
LARGEST_MOVE = 64 * 1024**2
LOOPBACK_PIECE = 64 * 1024
"""What is sent before it is received: the buffers of a socket hold it."""
LOOPBACK_LARGEST = 16 * 1024**2
LOOPBACK_CALLS = 8
"""The fewest messages of one call, so that a small one is no shorter than the clock can tell."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """A kernel that torch has no part in: its name and library version, its work per call in ``unit``, and the call."""

    name: str
    version: str
    work: float
    unit: str
    step: Step


def control_for(*, metric: str, flops: int, nbytes: int | None, dtype: str, kind: str | None = None) -> Control:
    """The control of a case by what bounds it: numpy's GEMM, libc's memmove of the same bytes, or tiny numpy calls.

    ``kind`` (``matmul``, ``memmove``, ``calls``, ``mixed``, ``loopback``) is the workload's own word. Normalisations
    and activations ask for the GEMM though their metric is MBU: one core computes them more slowly than memory feeds
    it, and how fast memmove is depends on how much of a shared cache the neighbours leave (2.8 times between two
    processes, the case unmoved).
    """
    kind = kind or {"mfu": "matmul", "mbu": "memmove" if nbytes else "calls"}.get(metric, "calls")
    if kind == "loopback":
        return loopback_control(nbytes or 0)
    if kind == "mixed":
        return mixed_control(flops, nbytes or 0, dtype)
    if kind == "matmul":
        return gemm_control(flops or SMALL_FLOPS, "float64" if dtype == "fp64" else "float32")
    return memmove_control(nbytes or 0) if kind == "memmove" else chain_control()


def gemm_control(flops: int, dtype: str) -> Control:
    """A square numpy GEMM with at most ``flops`` operations: the largest power of two that fits, from 64 to 1024."""
    import numpy as np

    exact = (max(flops, 1) / 2) ** (1 / 3)
    size = min(max(2 ** math.floor(math.log2(max(exact, 1)) + 1e-9), SMALLEST_GEMM), LARGEST_GEMM)
    generator = np.random.default_rng(seed=17)
    a = generator.standard_normal((size, size)).astype(dtype)
    b = generator.standard_normal((size, size)).astype(dtype)
    out = np.empty_like(a)
    return Control(
        name=f"numpy.matmul[{size},{dtype}]",
        version=np.__version__,
        work=2.0 * size**3,
        unit="FLOP",
        step=lambda: np.matmul(a, b, out=out),
    )


def mixed_control(flops: int, nbytes: int, dtype: str) -> Control:
    """A numpy GEMM and a memmove in the proportion of ``flops`` to ``nbytes``: a training step's layers and optimizer.

    Its work is one call, since its rate is in neither unit. More than LARGEST_MOVE is not moved beside one GEMM.
    """
    gemm = gemm_control(flops or SMALL_FLOPS, "float64" if dtype == "fp64" else "float32")
    move = memmove_control(min(max(round(nbytes * gemm.work / max(flops, 1)), 2), LARGEST_MOVE))

    def step() -> None:
        gemm.step()
        move.step()

    return Control(
        name=f"{gemm.name}+{move.name}", version=f"{gemm.version}+{move.version}", work=1.0, unit="calls", step=step
    )


def memmove_control(nbytes: int) -> Control:
    """libc's memmove that reads and writes ``nbytes`` in all."""
    import numpy as np

    half = max(nbytes // 2, 1)
    source = np.random.default_rng(seed=17).integers(0, 256, half, dtype=np.uint8)
    target = np.zeros_like(source)
    to, from_ = (array.ctypes.data_as(ctypes.c_void_p) for array in (target, source))  # these keep the arrays alive
    size = ctypes.c_size_t(half)

    def step() -> None:
        ctypes.memmove(to, from_, size)  # type: ignore[arg-type] # ctypes converts once, here it would every call

    return Control(
        name=f"libc.memmove[{half}]",
        version="-".join(part for part in platform.libc_ver() if part) or platform.system().lower(),
        work=2.0 * half,
        unit="B",
        step=step,
    )


def loopback_control(nbytes: int) -> Control:
    """A TCP connection of this process with itself, over the host's loopback, through which ``nbytes`` go.

    Pieces of LOOPBACK_PIECE at most are sent and then received; a collective of Gloo's moves its bytes alike, and is
    as slow as the same calls of the system are.
    """
    sender, receiver = _connected()
    piece = memoryview(bytearray(max(min(nbytes, LOOPBACK_PIECE), 1)))
    into = memoryview(bytearray(len(piece)))
    messages = max(math.ceil(min(nbytes, LOOPBACK_LARGEST) / len(piece)), LOOPBACK_CALLS)

    def step() -> None:
        for _ in range(messages):
            sender.sendall(piece)
            left = into
            while left:
                left = left[receiver.recv_into(left) :]

    return Control(
        name=f"loopback[{len(piece)}]x{messages}",
        version=platform.release(),
        work=float(messages * len(piece)),
        unit="B",
        step=step,
    )


@functools.cache
def _connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection over the loopback that sends small messages at once; one for the process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    for end in (sender, receiver):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * LOOPBACK_PIECE)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * LOOPBACK_PIECE)
        atexit.register(end.close)
    return sender, receiver


def read_control(nbytes: int) -> Control:
    """numpy's dot product of a vector with itself: reads ``nbytes``, writes nothing; a ceiling, never a control.

    A case that reads more than it writes passes memmove's rate.
    """
    import numpy as np

    x = np.ones(max(nbytes // 4, 1), dtype=np.float32)
    return Control(
        name=f"numpy.dot[{x.size}]", version=np.__version__, work=4.0 * x.size, unit="B", step=lambda: np.dot(x, x)
    )


def chain_control() -> Control:
    """A chain of numpy calls on 16 numbers each: interpreter and call overhead, no work to speak of."""
    import numpy as np

    a, b = np.linspace(0, 1, 16), np.linspace(1, 2, 16)
    out = np.empty_like(a)

    def step() -> None:
        for _ in range(CHAIN_LENGTH):
            np.add(a, b, out=out)

    return Control(
        name=f"numpy.add[16]x{CHAIN_LENGTH}",
        version=np.__version__,
        work=float(CHAIN_LENGTH),
        unit="calls",
        step=step,
    )
