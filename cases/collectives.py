"""Collective operations between all ranks: their time below 1 MiB, their bus bandwidth from there on."""

import pytest

from perfsuite import Collective

pytestmark = pytest.mark.perf(ranks="all")

KIB, MIB, GIB = 1024, 1024**2, 1024**3

# As nccl-tests counts them. The last two are for GPUs: their links fill near 512 MiB.
SIZES = {
    "8B": 8,
    "4KiB": 4 * KIB,
    "64KiB": 64 * KIB,
    "1MiB": MIB,
    "16MiB": 16 * MIB,
    "256MiB": 256 * MIB,
    "1GiB": GIB,
}
OPERATIONS = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "send_recv"]


# Over a host's loopback single samples of the large sizes differ by 20 %.
@pytest.mark.parametrize(
    "nbytes",
    [
        pytest.param(size, id=name, marks=pytest.mark.perf(budget_s=0.5 if size < MIB else 2))
        for name, size in SIZES.items()
    ],
)
@pytest.mark.parametrize("operation", OPERATIONS)
def bench_collective(operation, nbytes, ranks):
    return Collective(operation=operation, nbytes=nbytes, ranks=ranks)


# The two operations that torch has in both forms; the cases above have them out of place.
@pytest.mark.parametrize("size", ["64KiB", "16MiB", "1GiB"])
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def bench_in_place(operation, size, ranks):
    return Collective(operation=operation, nbytes=SIZES[size], ranks=ranks, in_place=True)


@pytest.mark.smoke
@pytest.mark.parametrize("size", ["4KiB", "16MiB"])
def bench_all_reduce_bf16(size, ranks):
    return Collective(operation="all_reduce", nbytes=SIZES[size], ranks=ranks, dtype="bf16")


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def bench_all_reduce_by(backend, ranks):
    return Collective(operation="all_reduce", nbytes=4 * MIB, ranks=ranks, backend=backend)
