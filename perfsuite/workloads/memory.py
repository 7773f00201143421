"""Memory bandwidth: the four STREAM loops, and copies between host and device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from perfsuite.dtypes import dtype_of
from perfsuite.errors import CaseError
from perfsuite.flops import Parts
from perfsuite.workloads.base import Step, Target, Work, Workload, plain_float, positive_int
from perfsuite.workloads.tensors import poisoned, random_source, random_tensor, torch_dtype

if TYPE_CHECKING:
    import torch

FACTOR = 3.0
"""STREAM's scalar q."""


@dataclass(frozen=True, kw_only=True)
class Stream(Workload):
    """One loop of STREAM over arrays of ``nbytes`` each (https://www.cs.virginia.edu/stream/ref.html).

    Bytes and FLOPs are STREAM's own counts: each array read or written once, no write-allocate.
    """

    metric = "mbu"
    inputs: ClassVar[int]
    flops_per_element: ClassVar[int]

    nbytes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        plain_float(name, self.dtype)
        positive_int(name, "nbytes", self.nbytes)
        if self.nbytes % dtype_of(self.dtype).itemsize:
            raise CaseError(f"{name}: nbytes={self.nbytes} must be whole elements of {self.dtype}")

    @property
    def elements(self) -> int:
        """Elements of one array."""
        return self.nbytes // dtype_of(self.dtype).itemsize

    def work(self) -> Work:
        """``declared``: in perfsuite's own convention element-wise work has no FLOPs, in STREAM's it has."""
        return Work(
            flops=self.flops_per_element * self.elements,
            nbytes=(self.inputs + 1) * self.nbytes,
            flop_convention="declared",
        )

    def parts(self) -> Parts:
        """None by `exact`, which is what torch's flop counter says too: element-wise work counts no FLOPs."""
        return ()

    def memory_bytes(self) -> int | None:
        """The arrays."""
        return (self.inputs + 1) * self.nbytes

    def _arrays(self, device: str) -> list[torch.Tensor]:
        """The inputs, then the output."""
        source = random_source(device)
        inputs = [random_tensor((self.elements,), self.dtype, source) for _ in range(self.inputs)]
        return [*inputs, poisoned((self.elements,), torch_dtype(self.dtype), device)]


@dataclass(frozen=True, kw_only=True)
class Copy(Stream):
    """c = a."""

    kind = "copy"
    inputs = 1
    flops_per_element = 0

    def build(self, device: str) -> Step:
        """One copy within the device."""
        a, out = self._arrays(device)
        return partial(out.copy_, a)


@dataclass(frozen=True, kw_only=True)
class Scale(Stream):
    """b = q c."""

    kind = "scale"
    inputs = 1
    flops_per_element = 1

    def build(self, device: str) -> Step:
        """One multiplication by a number."""
        import torch

        c, out = self._arrays(device)
        return partial(torch.mul, c, FACTOR, out=out)


@dataclass(frozen=True, kw_only=True)
class Add(Stream):
    """c = a + b."""

    kind = "add"
    inputs = 2
    flops_per_element = 1

    def build(self, device: str) -> Step:
        """One addition."""
        import torch

        a, b, out = self._arrays(device)
        return partial(torch.add, a, b, out=out)


@dataclass(frozen=True, kw_only=True)
class Triad(Stream):
    """a = b + q c."""

    kind = "triad"
    inputs = 2
    flops_per_element = 2

    def build(self, device: str) -> Step:
        """One addition with a factor: a single kernel."""
        import torch

        b, c, out = self._arrays(device)
        return partial(torch.add, b, c, alpha=FACTOR, out=out)


@dataclass(frozen=True, kw_only=True)
class Transfer(Workload):
    """A copy of ``nbytes`` between host and device; ``pinned`` host memory is page-locked.

    Judged by its time: the link is not the device memory whose bandwidth a data sheet states.
    """

    metric = "latency_us"

    nbytes: int
    pinned: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_int(type(self).__name__, "nbytes", self.nbytes)
        if not isinstance(self.pinned, bool):
            raise CaseError(f"{type(self).__name__}: pinned={self.pinned!r} must be True or False")

    def work(self) -> Work:
        """The bytes that the device's memory takes or gives."""
        return Work(flops=0, nbytes=self.nbytes)

    def memory_bytes(self) -> int | None:
        """What is held on the device."""
        return self.nbytes

    def unsupported(self, target: Target) -> str | None:
        """A CPU has no other side."""
        return "needs a GPU" if target.backend == "cpu" else None

    def _host(self, *, random: bool) -> torch.Tensor:
        """The host's buffer."""
        import torch

        host = torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=self.pinned)
        return host.random_(generator=random_source("cpu").generator) if random else host


@dataclass(frozen=True, kw_only=True)
class HostToDevice(Transfer):
    """From host memory to the device."""

    kind = "host_to_device"

    def build(self, device: str) -> Step:
        """One asynchronous copy; the harness waits for it."""
        host = self._host(random=True)
        return partial(poisoned((self.nbytes,), host.dtype, device).copy_, host, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class DeviceToHost(Transfer):
    """From the device to host memory."""

    kind = "device_to_host"

    def build(self, device: str) -> Step:
        """One asynchronous copy; the harness waits for it."""
        held = self._host(random=True).to(device)
        return partial(self._host(random=False).copy_, held, non_blocking=True)
