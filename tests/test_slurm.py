"""The Slurm script, with stand-ins for Slurm and for the ranks: what it starts, and with which code it ends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from perfsuite.settings import GPU_FLAG, OPTIONS

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "slurm" / "perfsuite.sbatch"
TEXT = SCRIPT.read_text(encoding="utf-8")

SCONTROL = """#!/bin/bash
[[ $1 == show && $2 == hostnames ]] || exit 1
printf '%s\\n' ${3//,/ }
"""
# One task per node, one after the other; as with Slurm, the step fails where a task does.
SRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$LOG/srun"
while [[ $1 == --* ]]; do shift; done
worst=0
for task in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_PROCID=$task "$@" || worst=$?
done
exit $worst
"""
# In place of torchrun: notes its arguments, and task 0 writes the session's end.
PYTHON = """#!/bin/bash
if [[ $1 != -m ]]; then exec "$REAL_PYTHON" "$@"; fi
printf '%s\\n' "$@" > "$LOG/torchrun-$SLURM_PROCID"
if [[ $SLURM_PROCID == 0 && -n $END ]]; then
    mkdir -p "${@: -1}"
    printf '{"end": %s}' "$END" > "${@: -1}/run.json"
fi
exit "$RANKS_EXIT"
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What became of a job."""

    code: int
    errors: str
    srun: list[str]
    torchrun: list[list[str]]


def submit(
    tmp_path: Path,
    *arguments: str,
    end: str = '{"exit": 0}',
    ranks_exit: int = 0,
    nodes: str = "n07,n08",
    count: int = 2,
    **variables: str,
) -> Job:
    """Run the script in ``tmp_path`` as Slurm's batch step does, on the first node."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "python-of-the-job": PYTHON}.items():
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": "python-of-the-job",
        "REAL_PYTHON": sys.executable,
        "LOG": str(tmp_path),
        "END": end,
        "RANKS_EXIT": str(ranks_exit),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(count),
        "SLURM_CPUS_PER_TASK": "96",
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=tmp_path,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    logs = sorted(tmp_path.glob("torchrun-*"))
    srun = tmp_path / "srun"
    return Job(
        code=done.returncode,
        errors=done.stderr,
        srun=srun.read_text(encoding="utf-8").splitlines() if srun.exists() else [],
        torchrun=[log.read_text(encoding="utf-8").splitlines() for log in logs],
    )


def test_the_script_is_bash() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    assert os.access(SCRIPT, os.X_OK)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_each_node_starts_one_torchrun_that_meets_on_the_first(tmp_path: Path) -> None:
    job = submit(tmp_path, "cases/collectives.py", "--gpu", "h100", "-k", "two words")
    assert job.code == 0, job.errors
    assert job.srun[:4] == ["--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=96", "--kill-on-bad-exit=1"]
    first, second = (parsed(each) for each in job.torchrun)
    for each in (first, second):
        assert (each.nnodes, each.nproc_per_node, each.max_restarts) == ("2", "gpu", 0)
        assert (each.rdzv_backend, each.rdzv_endpoint, each.rdzv_id) == ("c10d", "n07:26456", "123456")
        assert (each.module, each.training_script) == (True, "pytest")
        assert each.training_script_args == [
            *("cases/collectives.py", "--gpu", "h100", "-k", "two words"),
            *("--perf-report", "perf-run-123456"),
        ]
    assert (first.rdzv_conf, second.rdzv_conf) == ("is_host=1", "is_host=0")


class _Torchrun:
    """The arguments as torchrun's own parser reads them; it ends the test where it does not know one."""

    nnodes: str
    nproc_per_node: str
    max_restarts: int
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_id: str
    rdzv_conf: str
    module: bool
    training_script: str
    training_script_args: list[str]


def parsed(arguments: list[str]) -> _Torchrun:
    from torch.distributed.run import get_args_parser

    assert arguments[:2] == ["-m", "torch.distributed.run"]
    return get_args_parser().parse_args(arguments[2:], namespace=_Torchrun())


def test_the_options_for_pytest_are_there() -> None:
    used = set(re.findall(r"--(?:perf-[a-z-]+[a-z]|gpu)(?= )", TEXT))
    assert "--perf-report" in used
    assert used <= {option.flag for option in OPTIONS} | {GPU_FLAG}


def test_report_and_ranks_can_be_chosen(tmp_path: Path) -> None:
    job = submit(tmp_path, PERF_REPORT="elsewhere", PERF_RANKS_PER_NODE="4")
    assert job.code == 0, job.errors
    each = parsed(job.torchrun[0])
    assert (each.nproc_per_node, each.training_script_args) == ("4", ["--perf-report", "elsewhere"])


@pytest.mark.parametrize(
    ("end", "ranks_exit", "code"),
    [
        ('{"exit": 0}', 0, 0),
        ('{"exit": 2}', 0, 2),
        ('{"exit": 5}', 1, 5),
        ('{"exit": 0}', 3, 3),
        ("null", 0, 1),
        ("", 1, 1),
    ],
)
def test_the_job_ends_with_the_sessions_code(tmp_path: Path, end: str, ranks_exit: int, code: int) -> None:
    job = submit(tmp_path, end=end, ranks_exit=ranks_exit)
    assert job.code == code
    assert ("did not end in order" in job.errors) == (end in ("", "null"))


def test_nodes_that_scontrol_does_not_name_are_refused(tmp_path: Path) -> None:
    job = submit(tmp_path, nodes="n07", count=2)
    assert job.code == 4
    assert "scontrol names 1 of 2 nodes" in job.errors
    assert job.torchrun == []
