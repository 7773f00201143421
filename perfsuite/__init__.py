"""A pytest plugin that fails a build when GPU work got slower than the hardware has shown it can run it.

PYTEST_DONT_REWRITE: `pytest-benchmark compare` makes two pytest configurations, and the second would warn of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfsuite.workloads.attention import Attention as Attention
    from perfsuite.workloads.base import Prepared as Prepared
    from perfsuite.workloads.base import Work as Work
    from perfsuite.workloads.base import Workload as Workload
    from perfsuite.workloads.collective import Collective as Collective
    from perfsuite.workloads.gemm import Gemm as Gemm
    from perfsuite.workloads.inference import Decode as Decode
    from perfsuite.workloads.inference import Prefill as Prefill
    from perfsuite.workloads.input_pipeline import InputPipeline as InputPipeline
    from perfsuite.workloads.kernel import Kernel as Kernel
    from perfsuite.workloads.latency import Launch as Launch
    from perfsuite.workloads.linear_gelu import LinearGelu as LinearGelu
    from perfsuite.workloads.memory import Add as Add
    from perfsuite.workloads.memory import Copy as Copy
    from perfsuite.workloads.memory import DeviceToHost as DeviceToHost
    from perfsuite.workloads.memory import HostToDevice as HostToDevice
    from perfsuite.workloads.memory import Scale as Scale
    from perfsuite.workloads.memory import Triad as Triad
    from perfsuite.workloads.parallel import Parallel as Parallel
    from perfsuite.workloads.pointwise import Dropout as Dropout
    from perfsuite.workloads.pointwise import Gelu as Gelu
    from perfsuite.workloads.pointwise import LayerNorm as LayerNorm
    from perfsuite.workloads.pointwise import ResidualAdd as ResidualAdd
    from perfsuite.workloads.pointwise import RMSNorm as RMSNorm
    from perfsuite.workloads.pointwise import SiluMul as SiluMul
    from perfsuite.workloads.pointwise import Softmax as Softmax
    from perfsuite.workloads.quantized import QuantizedGemv as QuantizedGemv
    from perfsuite.workloads.reduction import Reduction as Reduction
    from perfsuite.workloads.train_step import TrainStep as TrainStep
    from perfsuite.workloads.transformer import TransformerLayer as TransformerLayer

__version__ = "0.1.0"

# Where each public name lives; nothing is imported before it is asked for.
_HOMES = {
    "attention": ("Attention",),
    "base": ("Prepared", "Work", "Workload"),
    "collective": ("Collective",),
    "gemm": ("Gemm",),
    "inference": ("Decode", "Prefill"),
    "input_pipeline": ("InputPipeline",),
    "kernel": ("Kernel",),
    "latency": ("Launch",),
    "linear_gelu": ("LinearGelu",),
    "memory": ("Add", "Copy", "DeviceToHost", "HostToDevice", "Scale", "Triad"),
    "parallel": ("Parallel",),
    "pointwise": ("Dropout", "Gelu", "LayerNorm", "RMSNorm", "ResidualAdd", "SiluMul", "Softmax"),
    "quantized": ("QuantizedGemv",),
    "reduction": ("Reduction",),
    "train_step": ("TrainStep",),
    "transformer": ("TransformerLayer",),
}
_HOME_OF = {name: f"perfsuite.workloads.{home}" for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604 - the names of the table above


if not TYPE_CHECKING:  # a type checker that knew of it would take any name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'perfsuite' has no attribute {name!r}")
        return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
