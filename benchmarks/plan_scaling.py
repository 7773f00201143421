"""How a plan's time grows with its cases: 10,000 generated ones against 1,000 (12 times at most is wanted).

python benchmarks/plan_scaling.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FEW, MANY, LIMIT = 1_000, 10_000, 12
CASES = """
import os

import pytest

from perfsuite import Gemm

@pytest.mark.parametrize("m", range(1, int(os.environ["CASES"]) + 1))
def bench_gemm(m):
    return Gemm(m=m, n=64, k=64, dtype="bf16")
"""


def plan_s(directory: Path, count: int) -> float:
    """Seconds that a session takes which plans ``count`` cases."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-p", "perfsuite.plugin", "-q", "bench_many.py"]
    start_s = time.perf_counter()
    subprocess.run(
        [*command, "--gpu", "a100-sxm4-80gb", "--perf-plan"],
        cwd=directory,
        env={**os.environ, "CASES": str(count), "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - start_s


def main() -> int:
    """Print both times and their ratio; 1 where it passes the limit."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "bench_many.py").write_text(CASES, encoding="utf-8")
        few_s, many_s = plan_s(directory, FEW), plan_s(directory, MANY)
    ratio = many_s / few_s
    sys.stdout.write(f"{FEW} cases: {few_s:.2f} s; {MANY} cases: {many_s:.2f} s; {ratio:.1f} times (limit {LIMIT})\n")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
