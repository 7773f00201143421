"""Collective operations: what they move, and what every rank holds after them, on real ranks of Gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from perfsuite import Collective
from perfsuite.errors import CaseError
from perfsuite.measure.check import check_agreement, prepared
from perfsuite.workloads.base import Communication, Target
from perfsuite.workloads.collective import PLACES

MIB = 1024**2
SHARDED = ("reduce_scatter", "all_gather", "all_to_all")

# Every rank makes every operation once, and tells what it held before and after, and what its reference says.
RANK = """
import json, sys
from torch import distributed
from perfsuite import Collective
from perfsuite.errors import CaseError
from perfsuite.measure.attempt import AttemptSpec, attempt
from perfsuite.measure.bench import Bench
from perfsuite.measure.check import check_agreement, check_numbers
from perfsuite.measure.clock import HostClock
from perfsuite.measure.group import GroupClock, world_group
from perfsuite.workloads import collective, collective_check
from perfsuite.workloads.base import Target

rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = distributed.FileStore(f"{folder}/store{ranks}", ranks)
distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
told = {"results": {}, "inputs": {}, "fault": "", "refused": ""}

def numbers(tensor):
    return None if tensor is None else tensor.tolist()

def fill(buffer, **names):
    filled = collective_check.fill_input(buffer, **names)
    told["inputs"][key] = numbers(filled)
    return filled

collective.fill_input = fill
for operation, places in collective.PLACES.items():
    for in_place in places:
        for dtype in ("fp32", "bf16"):
            key = f"{operation}-{in_place}-{dtype}"
            # Three times: what is used up and what is stale shows from the second time on.
            case = Collective(operation=operation, nbytes=96, ranks=ranks, in_place=in_place, dtype=dtype).build("cpu")
            for _ in range(3):
                case.before_block()
                result = case.step()
                check_numbers(result)
                check_agreement(result, case.reference(), rtol=0.0, atol=0.0)
            told["results"][key] = numbers(result)

# A copy of rank 1's that draws other numbers than the ranks expect of it.
def wrong(buffer, *, rank, ranks):
    return collective_check.fill_input(buffer, rank=rank + 9 * (rank == 1), ranks=ranks)

collective.fill_input = wrong
group = world_group(lambda: None)
clock = GroupClock(HostClock(), group, on_device=False)
bench = Bench(torch_device="cpu", target=Target(backend="cpu", sku="cpu"), clock=clock, group=group)
# The rank after it gets them.
case = Collective(operation="send_recv", nbytes=96, ranks=ranks)
failure = attempt(case, AttemptSpec(budget_s=1.0, iteration_limit_s=1.0), bench)
told["fault"] = f"{failure.outcome.name} {failure.reason}"
try:
    Collective(operation="all_reduce", nbytes=96, ranks=ranks + 1).build("cpu")
except CaseError as error:
    told["refused"] = str(error)
with open(f"{folder}/{ranks}.{rank}.json", "w") as file:
    json.dump(told, file)
distributed.barrier()
distributed.destroy_process_group()
"""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one rank said: by operation, place and data type what it put in, and what it held afterwards."""

    results: dict[str, list[float] | None]
    inputs: dict[str, list[float]]
    fault: str
    refused: str


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Told]]:
    """Of two ranks and of three, in rank order."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", RANK, str(rank), str(ranks), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for ranks in (2, 3)
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * 5, "\n".join(said)
    assert not [line for text in said for line in text.splitlines() if "warn" in line.lower()]
    return {ranks: [read(folder / f"{ranks}.{rank}.json") for rank in range(ranks)] for ranks in (2, 3)}


def read(path: Path) -> Told:
    return Told(**json.loads(path.read_text(encoding="utf-8")))


FORMS = [(operation, in_place) for operation, places in PLACES.items() for in_place in places]


def shares(values: list[float], ranks: int) -> list[list[float]]:
    """``values`` in equal parts."""
    each = len(values) // ranks
    return [values[start : start + each] for start in range(0, len(values), each)]


def added(inputs: list[list[float]]) -> list[float]:
    return [sum(values) for values in zip(*inputs, strict=True)]


# By operation, what a rank holds afterwards of all ranks' inputs; written here once more, by other means.
BY_HAND: dict[str, Callable[[list[list[float]], int], list[float] | None]] = {
    "all_reduce": lambda inputs, rank: added(inputs),
    "reduce": lambda inputs, rank: added(inputs) if rank == 0 else None,
    "broadcast": lambda inputs, rank: inputs[0],
    "reduce_scatter": lambda inputs, rank: shares(added(inputs), len(inputs))[rank],
    "all_gather": lambda inputs, rank: [value for values in inputs for value in values],
    "all_to_all": lambda inputs, rank: [value for values in inputs for value in shares(values, len(inputs))[rank]],
    "send_recv": lambda inputs, rank: inputs[rank - 1],
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("operation", "in_place"), FORMS)
def test_every_rank_holds_what_it_should(
    told: dict[int, list[Told]], operation: str, in_place: bool, ranks: int, dtype: str
) -> None:
    key = f"{operation}-{in_place}-{dtype}"
    inputs = [each.inputs.get(key, []) for each in told[ranks]]
    putting_in = [values for values in inputs if values]
    assert len(putting_in) == (1 if operation == "broadcast" else ranks)
    assert len({tuple(values) for values in putting_in}) == len(putting_in)
    assert all(-1 <= value <= 1 for values in putting_in for value in values)
    for rank, each in enumerate(told[ranks]):
        assert each.results[key] == BY_HAND[operation](inputs, rank), rank


def test_a_rank_with_wrong_data_is_incorrect_on_all(told: dict[int, list[Told]]) -> None:
    for ranks, receiver in ((2, 0), (3, 2)):
        start = f"INCORRECT rank {receiver}: the step's result is not its reference's"
        assert [each.fault[: len(start)] for each in told[ranks]] == [start] * ranks


def test_another_number_of_ranks_than_the_groups_is_refused(told: dict[int, list[Told]]) -> None:
    assert told[2][1].refused == (
        "Collective: ranks=3 must be the 2 of the group; take their number from the fixture 'ranks'"
    )


@pytest.mark.parametrize(
    ("operation", "wires"),
    [
        # S = 48 bytes with 1, 2, 3 and 8 ranks; eight shares of one element are 32 bytes.
        ("all_reduce", [0, 48, 64, 84]),
        ("reduce_scatter", [0, 24, 32, 28]),
        ("all_gather", [0, 24, 32, 28]),
        ("all_to_all", [0, 24, 32, 28]),
        ("broadcast", [0, 48, 48, 48]),
        ("reduce", [0, 48, 48, 48]),
        ("send_recv", [0, 48, 48, 48]),
    ],
)
def test_bytes_on_the_wire(operation: str, wires: list[int]) -> None:
    works = [Collective(operation=operation, nbytes=48, ranks=ranks).work() for ranks in (1, 2, 3, 8)]
    assert [work.wire_bytes for work in works] == wires
    assert {(work.flops, work.nbytes, work.calls) for work in works} == {(0, None, 1)}


@pytest.mark.parametrize(
    ("operation", "nbytes", "ranks", "dtype", "moved"),
    [
        ("all_reduce", 8, 3, "fp32", 8),
        ("send_recv", 8, 3, "fp32", 8),
        ("all_gather", 8, 2, "fp32", 8),
        ("all_gather", 8, 3, "fp32", 12),  # one element each, though two are asked for
        ("reduce_scatter", 4, 8, "bf16", 16),
        ("all_to_all", 64, 3, "fp32", 60),
        ("all_to_all", MIB, 8, "fp64", MIB),
    ],
)
def test_what_is_really_moved(operation: str, nbytes: int, ranks: int, dtype: str, moved: int) -> None:
    case = Collective(operation=operation, nbytes=nbytes, ranks=ranks, dtype=dtype)
    assert case.communication().nbytes == case.describe()["moved_bytes"] == moved
    assert case.describe()["nbytes"] == nbytes


@pytest.mark.parametrize(
    ("operation", "in_place", "held"),
    [
        # S = 96 bytes on three ranks; in place it is what is worked on and the copy of the input.
        ("all_reduce", True, 192),
        ("reduce", True, 192),
        ("broadcast", True, 192),
        ("reduce_scatter", False, 96 + 32),
        ("reduce_scatter", True, 192),
        ("all_gather", False, 32 + 96),
        ("all_gather", True, 96 + 32),
        ("all_to_all", False, 192),
        ("send_recv", False, 192),
    ],
)
def test_one_ranks_memory(operation: str, in_place: bool, held: int) -> None:
    assert Collective(operation=operation, nbytes=96, ranks=3, in_place=in_place).memory_bytes() == held


def test_small_ones_are_judged_by_latency_and_large_ones_by_bus_bandwidth() -> None:
    small = Collective(operation="all_gather", nbytes=MIB - 4, ranks=2)
    large = Collective(operation="all_gather", nbytes=MIB, ranks=3)
    alone = Collective(operation="all_gather", nbytes=MIB, ranks=1)
    assert [case.judged_by() for case in (small, large, alone)] == ["latency_us", "busbw_utilization", "latency_us"]
    assert large.group_size() == 3
    assert large.cpu_control() == "loopback"


def test_the_place_is_torchs_own_where_it_is_left_out() -> None:
    said = {name: Collective(operation=name, nbytes=96, ranks=2).communication() for name in PLACES}
    assert said["all_reduce"] == Communication(operation="all_reduce", nbytes=96, in_place=True)
    assert {name for name, each in said.items() if each.in_place} == {"all_reduce", "broadcast", "reduce"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operation": "gather"}, "operation='gather' must be one of all_reduce, reduce_scatter"),
        ({"nbytes": 0}, "nbytes=0 must be a whole number of at least 1"),
        ({"nbytes": 6}, "nbytes=6 must be whole elements of fp32"),
        ({"ranks": 0}, "ranks=0 must be a whole number of at least 1"),
        ({"dtype": "int8"}, "dtype='int8' must be one of"),
        ({"in_place": 1}, "in_place=1 must be True or False"),
        ({"in_place": False}, "in_place=False is no form of all_reduce in torch; leave it out"),
        ({"operation": "all_to_all", "in_place": True}, "in_place=True is no form of all_to_all"),
        ({"operation": "send_recv", "in_place": True}, "in_place=True is no form of send_recv"),
        ({"backend": "mpi"}, "backend='mpi' must be one of gloo, nccl, xccl"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError, match=f"Collective: {message}"):
        Collective(**{"operation": "all_reduce", "nbytes": 8, "ranks": 2, **arguments})


CPU, GPU = Target(backend="cpu", sku="cpu"), Target(backend="cuda", sku="h100-sxm5-80gb")


def test_a_backend_has_its_devices() -> None:
    nccl = Collective(operation="all_reduce", nbytes=8, ranks=2, backend="nccl")
    gloo = Collective(operation="send_recv", nbytes=8, ranks=2, backend="gloo")
    assert (nccl.unsupported(CPU), nccl.unsupported(GPU)) == ("nccl needs GPUs", None)
    assert (gloo.unsupported(CPU), gloo.unsupported(GPU)) == (None, "gloo sends no tensors of a GPU")


def test_a_cpu_moves_no_gigabytes() -> None:
    fits, large = (Collective(operation="broadcast", nbytes=mib * MIB, ranks=2) for mib in (64, 256))
    assert fits.unsupported(CPU) is large.unsupported(GPU) is None
    assert large.unsupported(CPU) == "256 MiB are for GPUs, collectives on a CPU have at most 64.0 MiB"


# On one rank, in a process of its own: a default group is there for good.
ALONE = """
from torch import distributed
from perfsuite import Collective
from perfsuite.errors import CaseError
from perfsuite.measure.check import check_agreement
from perfsuite.workloads.collective import PLACES
from perfsuite.workloads.groups import data_group

try:
    Collective(operation="all_reduce", nbytes=8, ranks=1, backend="nccl").build("cpu")
except CaseError as error:
    print(error)
assert not distributed.is_initialized()
for operation, places in PLACES.items():
    for in_place in places:
        case = Collective(operation=operation, nbytes=96, ranks=1, in_place=in_place).build("cpu")
        case.before_block()
        check_agreement(case.step(), case.reference(), rtol=0.0, atol=0.0)
world = data_group(None, "cpu")
assert data_group("gloo", "cpu") is world
print(world.size())
"""


def test_one_rank_needs_no_other() -> None:
    command = [sys.executable, "-W", "error", "-c", ALONE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["backend='nccl' is not there for cpu; there is gloo", "1"]


def test_on_meta_nothing_is_needed() -> None:
    case = prepared(Collective(operation="all_reduce", nbytes=1024**3, ranks=8).build("meta"))
    check_agreement(case.step(), None, rtol=None, atol=None)


def test_one_rank_of_a_cpu_copies_no_large_buffers() -> None:
    target = Target(backend="cpu", sku="cpu-some")
    large = Collective(operation="all_reduce", nbytes=2**24, ranks=1).unsupported(target)
    assert large == "one rank moves nothing, 16.0 MiB are for several: --perf-ranks 2"
    assert Collective(operation="all_reduce", nbytes=2**20, ranks=1).unsupported(target) is None
    assert Collective(operation="all_reduce", nbytes=2**24, ranks=2).unsupported(target) is None
    assert (
        Collective(operation="all_reduce", nbytes=2**24, ranks=1).unsupported(replace(target, backend="cuda")) is None
    )
