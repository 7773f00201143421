"""The declared cases: every one constructs, without torch, under an id of its own, at a size that fits somewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from perfsuite.hardware.catalogue import load_catalogue

ROOT = Path(__file__).resolve().parent.parent

# pytest itself expands the cases; its own hook takes what they return instead of measuring it.
COLLECT = """
import json, sys
import pytest

class Collector:
    def __init__(self):
        self.cases = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem.fixturenames if name != "request"}
        workload = pyfuncitem.obj(**arguments)
        work = workload.work()
        self.cases.append({
            "file": pyfuncitem.path.name, "id": pyfuncitem.nodeid, "kind": workload.kind, "metric": workload.metric,
            "dtype": workload.dtype, "flops": work.flops, "nbytes": work.nbytes, "memory": workload.memory_bytes(),
            "smoke": pyfuncitem.get_closest_marker("smoke") is not None,
        })
        return True

collector = Collector()
exit_code = pytest.main(sys.argv[2:], plugins=[collector])
with open(sys.argv[1], "w") as file:
    json.dump({"exit": int(exit_code), "torch": "torch" in sys.modules, "cases": collector.cases}, file)
"""
