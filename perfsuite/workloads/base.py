"""What a case returns: declared work and how to build it. Nothing here times anything or imports torch."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.dtypes import dtype_of
from perfsuite.errors import CaseError
from perfsuite.flops import FlopPart, Parts, flops_by_dtype, hardware_flops, model_flops

Step = Callable[[], Any]
"""A zero-argument callable that does one iteration; what it returns is only looked at for correctness."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A step with what else it needs or tells; ``build`` may return one in place of the step.

    ``check`` says before anything is timed what is wrong with the step's results, in one line, or None; the case is
    then INCORRECT. ``before_block`` runs untimed before every timed block and before each check. ``reset`` runs once
    after warm-up; ``shares`` then tells which shares of the step's time the device spent waiting, such as
    ``input_wait``, as fractions. ``resident_bytes`` is what the step's tensors hold between two steps. ``close`` ends
    what the step has started, whatever happened. ``alone`` is a step that one rank makes by itself, to compare a
    group's with; it does ``alone_share`` of the group's work.
    """

    step: Step
    reference: Step | None = None
    check: Callable[[], str | None] | None = None
    before_block: Callable[[], object] | None = None
    reset: Callable[[], object] | None = None
    shares: Callable[[], Mapping[str, float]] | None = None
    resident_bytes: Callable[[], int] | None = None
    close: Callable[[], object] | None = None
    alone: Step | None = None
    alone_share: float = 1.0


Built = Step | tuple[Step, Step] | Prepared
"""What ``build`` returns: the step, the step and its reference on the same inputs, or a `Prepared`."""

Description = dict[str, str | int | float | bool | None]

PLAIN_FLOATS = ("fp64", "fp32", "bf16", "fp16")
METRICS = ("mfu", "mbu", "busbw_utilization", "latency_us")
CONVENTIONS = ("exact", "palm", "torchtitan", "megatron", "hfu", "counted", "declared")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step does: ``flops`` (or integer operations), bytes of memory traffic, bytes on the wire, and calls.

    Of a group of ranks it is the whole group's work, but for ``wire_bytes``: S x the operation's factor, a rank's share
    as nccl-tests counts it. ``calls`` is how many calls of the framework a latency case makes.

    ``flops`` is None where nobody declared them (they are then counted once in the worker), 0 where the step does none.
    ``flops_by_dtype`` splits them where a step computes in several data types; empty means all in the case's own.

    ``hardware_flops`` counts what is recomputed too (HFU's numerator; None where nobody asks). ``tokens`` is how many
    tokens one step goes through. ``flops_by_convention`` is the same step by other people's counts.
    """

    flops: int | None
    nbytes: int | None
    wire_bytes: int = 0
    flop_convention: str = "exact"
    calls: int = 1
    flops_by_dtype: tuple[tuple[str, int], ...] = ()
    hardware_flops: int | None = None
    tokens: int = 0
    flops_by_convention: tuple[tuple[str, int], ...] = ()


def work_of_parts(parts: Parts, *, dtype: str, nbytes: int | None, **more: Any) -> Work:
    """The work of a step that is declared part by part, in ``dtype`` where a part has no data type of its own."""
    return Work(
        flops=model_flops(parts),
        hardware_flops=hardware_flops(parts),
        flops_by_dtype=flops_by_dtype(parts, dtype=dtype),
        nbytes=nbytes,
        **more,
    )


@dataclass(frozen=True, kw_only=True)
class Communication:
    """A collective operation as nccl-tests names and sizes it: ``nbytes`` is S."""

    operation: str
    nbytes: int
    in_place: bool = False


@dataclass(frozen=True, kw_only=True)
class Target:
    """The device that a workload is asked about: backend (``cpu``, ``cuda``, ``rocm``, ``xpu``), SKU, capability."""

    backend: str
    sku: str
    compute_capability: str | None = None

    def at_least(self, major: int, minor: int = 0) -> bool:
        """Whether a CUDA device's compute capability is at least ``major.minor``; False where it is not known."""
        parts = (self.compute_capability or "").split(".")
        if len(parts) != 2 or not all(part.isdigit() for part in parts):
            return False
        return (int(parts[0]), int(parts[1])) >= (major, minor)


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """One step's work, declared by arithmetic on shapes alone: cheap to construct, no tensors, no torch.

    ``build(device)`` allocates for a torch device string and returns the step, or ``(step, reference)``: two callables
    on the same inputs whose results must agree before anything is timed. Called again it returns an independent copy.
    """

    kind: ClassVar[str]
    metric: ClassVar[str | None] = None
    """Which figure is judged; None lets the arithmetic intensity decide between ``mfu`` and ``mbu``."""
    sized: ClassVar[bool] = True
    """Whether the work follows from shapes, so that a step too long for the device is foreseen and skipped."""
    fill: ClassVar[str] = "random"
    """What the inputs hold; zeros draw less power than random numbers and run faster, so it is recorded."""

    rotates: ClassVar[bool] = True
    """Whether a GPU runs it over several copies, so that none is in L2 when its turn comes again."""

    dtype: str = "fp32"

    if TYPE_CHECKING:
        # For type checkers alone: Kernel's build is a field, and a method here would become its default.
        @property
        def build(self) -> Callable[[str], Built]:
            """Allocates on a torch device and returns what one iteration is."""

    def __post_init__(self) -> None:
        dtype_of(self.dtype)

    @abstractmethod
    def work(self) -> Work:
        """The work of one step."""

    def parts(self) -> Parts:
        """The FLOPs of one step by component; one component where the workload has no others."""
        return (FlopPart(name=self.kind, forward=self.work().flops or 0),)

    @abstractmethod
    def memory_bytes(self) -> int | None:
        """Predicted peak memory of one copy and its step in bytes; None where it cannot be known."""

    def memory_parts(self) -> dict[str, int]:
        """The same by what holds it (``parameters``, ``gradients``, ...); empty where nothing is to be told apart."""
        return {}

    def judged_by(self) -> str | None:
        """Which figure is judged, where the workload knows better than its arithmetic intensity."""
        return self.metric

    def communication(self) -> Communication | None:
        """The collective operation that the step is; None where it is none, or more than one."""
        return None

    def group_size(self) -> int:
        """How many ranks one step is made by together; 1 where each rank's step is its own."""
        return 1

    def unsupported(self, target: Target) -> str | None:
        """Why this workload cannot run on ``target``, in a few words; None where it can."""
        return None

    def cpu_control(self) -> str | None:
        """A CPU's control beside it: ``matmul``, ``memmove``, ``mixed``, ``loopback`` or ``calls``; None: by metric."""
        return None

    def launch(self) -> str | None:
        """How the step has to reach the device: ``eager``, ``graph`` or ``compile``; None leaves it to the sampler.

        ``graph`` asks for a CUDA graph of the step; a ``compile`` case has called ``torch.compile`` in ``build``.
        """
        return None

    def describe(self) -> Description:
        """The kind and the parameters, for the record: plain values only."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {name: value for name, value in fields.items() if isinstance(value, str | int | float | bool | None)}
        return {"kind": self.kind, "fill": self.fill, **plain}


def positive_int(case: str, name: str, value: object) -> int:
    """``value`` as a positive whole number, or a CaseError that names the workload and the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CaseError(f"{case}: {name}={value!r} must be a whole number of at least 1")
    return value


def non_negative_count(case: str, name: str, value: object) -> int:
    """``value`` as a finite count of at least 0 (``2e9`` is accepted), or a CaseError that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise CaseError(f"{case}: {name}={value!r} must be a finite number of at least 0")
    if value != int(value):
        raise CaseError(f"{case}: {name}={value!r} must be a whole number")
    return int(value)


def plain_float(case: str, dtype: str) -> None:
    """Nothing where ``dtype`` is one that element-wise work computes in, or a CaseError that names the workload."""
    if dtype not in PLAIN_FLOATS:
        raise CaseError(f"{case}: dtype={dtype!r} must be one of {', '.join(PLAIN_FLOATS)}")


def one_of(case: str, name: str, value: object, choices: Mapping[str, object] | tuple[str, ...]) -> None:
    """Nothing where ``value`` is one of ``choices``, or a CaseError that lists them."""
    if value not in tuple(choices):  # a list has no hash to look up in a mapping
        raise CaseError(f"{case}: {name}={value!r} must be one of {', '.join(choices)}")


def true_or_false(case: str, name: str, value: object) -> None:
    """Nothing where ``value`` is a bool, or a CaseError that names the workload and the argument."""
    if not isinstance(value, bool):
        raise CaseError(f"{case}: {name}={value!r} must be True or False")


# The compute capability that a data type's matrix units need.
NEEDED_CAPABILITY = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9), "int8": (7, 5)}


def lacks_dtype(dtype: str, target: Target) -> str | None:
    """Why ``target`` has no matrix units for ``dtype``; None where it has, or computes it without."""
    if dtype == "tf32" and target.backend not in ("cuda", "rocm"):
        return "no TF32"
    needed = NEEDED_CAPABILITY.get(dtype)
    if target.backend == "cuda" and needed and not target.at_least(*needed):
        has = target.compute_capability or "unknown"
        return f"{dtype} needs compute capability {needed[0]}.{needed[1]}, this device's is {has}"
    return None
