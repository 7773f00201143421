"""What hardware there is: a catalogue of sourced peaks, and the devices of this machine."""

from perfsuite.hardware.catalogue import Catalogue, Hardware, load
from perfsuite.hardware.conditions import NvmlConditions, read_nvml_conditions
from perfsuite.hardware.device import Device, SystemView
from perfsuite.hardware.selection import detect, gather, select, select_all

__all__ = [
    "Catalogue",
    "Device",
    "Hardware",
    "NvmlConditions",
    "SystemView",
    "detect",
    "gather",
    "load",
    "read_nvml_conditions",
    "select",
    "select_all",
]
