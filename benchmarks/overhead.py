"""What the harness costs, and whether its times are those of other timers.

Prints, for steps of 5 ms and more, the share of an attempt's sampling that is neither timed region, build (with the
checks before sampling and the peak-memory pass), warm-up nor control; then the paired ratio of our median to
pytest-benchmark's and to torch.utils.benchmark's for the same step, in one process and in turns, with a 95 % bootstrap
interval. Run it as `.venv/bin/python benchmarks/overhead.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from perfsuite.workers.bench import cpu_environment

TURNS = """
import json
import statistics

import pytest
from torch.utils.benchmark import Timer

from perfsuite import Gemm
from perfsuite.measure.attempt import AttemptSpec, attempt
from perfsuite.measure.measurement import Measurement
from perfsuite.workers.bench import prepare
from perfsuite.workers.protocol import WorkerConfig

CASE = Gemm(m=256, n=3072, k=768, dtype="fp32")
BENCH = prepare(WorkerConfig(fd=-1, backend="cpu", device_index=0, sku="cpu-benchmark"))
SPEC = AttemptSpec(budget_s=1.0, iteration_limit_s=10.0, half_width=1e-9)
STEP = CASE.build("cpu")
FOUND = []


def ours():
    found = attempt(CASE, SPEC, BENCH)
    assert isinstance(found, Measurement), found
    cost = found.overhead
    spent = cost.build_s + cost.warmup_s + cost.timed_s + cost.control_s
    row = {"ours_s": found.time.median_s, "outside": (cost.wall_s - spent) / cost.sampling_wall_s}
    return {**row, "outside_sampling": 1 - (cost.timed_s + cost.control_s) / cost.sampling_wall_s}


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_turn(benchmark, turn):
    row = ours()
    benchmark.pedantic(STEP, rounds=40, iterations=1, warmup_rounds=3)
    row["pytest_benchmark_s"] = benchmark.stats.stats.median
    timer = Timer("step()", globals={"step": STEP}, num_threads=1)
    row["torch_benchmark_s"] = statistics.median(timer.timeit(1).median for _ in range(40))
    FOUND.append(row)
    if turn == ROUNDS - 1:
        with open(OUT, "w") as file:
            json.dump(FOUND, file)
"""


def main() -> None:
    """Take turns in one child process, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        out, test = Path(folder) / "found.json", Path(folder) / "test_turns.py"
        test.write_text(TURNS.replace("ROUNDS", str(rounds)).replace("OUT", repr(str(out))), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "--benchmark-quiet", "-p", "no:cacheprovider", str(test)]
        environment = {**os.environ, **cpu_environment(1)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
        found = json.loads(out.read_text(encoding="utf-8"))
    columns = {name: np.array([row[name] for row in found]) for name in found[0]}
    print(f"step of {np.median(columns['ours_s']) * 1e3:.2f} ms, {rounds} turns in one process")
    print(f"outside timed regions and control while sampling: {np.median(columns['outside_sampling']):.2%} of it")
    print(f"outside build, warm-up, timed regions and control: {np.median(columns['outside']):.2%} of the sampling")
    for name in ("pytest_benchmark", "torch_benchmark"):
        low, middle, high = ratio(columns["ours_s"] / columns[f"{name}_s"])
        print(f"our median / {name}'s: {middle:.4f}, 95 % interval [{low:.4f}, {high:.4f}]")


def ratio(ratios: np.ndarray) -> tuple[float, float, float]:
    """The median of paired ratios and its 95 % bootstrap interval."""
    draws = np.random.default_rng(seed=1).choice(ratios, size=(4000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(low), float(np.median(ratios)), float(high)


if __name__ == "__main__":
    main()
