"""Memory bandwidth by STREAM's loops, and copies between host and device."""

import pytest

from perfsuite import Add, Copy, DeviceToHost, HostToDevice, Scale, Triad

MIB = 1024**2
GIB = 1024**3

# The small arrays suit a CPU. The large ones are far more than four times any L2 (MI300X: 256 MiB of last-level cache)
# and still fit, three at a time, a GPU with 16 GB.
ARRAYS = {"64MiB": 64 * MIB, "4GiB": 4 * GIB}
LOOPS = [Copy, Scale, Add, pytest.param(Triad, marks=pytest.mark.smoke)]


@pytest.mark.parametrize("nbytes", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize("loop", LOOPS, ids=["copy", "scale", "add", "triad"])
def bench_stream(loop, nbytes):
    return loop(nbytes=nbytes, dtype="fp32")


@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def bench_triad(dtype):
    return Triad(nbytes=64 * MIB, dtype=dtype)


@pytest.mark.parametrize("mib", [8, 256], ids="{}MiB".format)
def bench_copy(mib):
    return Copy(nbytes=mib * MIB, dtype="fp32")


@pytest.mark.parametrize(("nbytes", "pinned"), [(256 * MIB, True), (64 * MIB, False)], ids=["pinned", "pageable"])
@pytest.mark.parametrize("direction", [HostToDevice, DeviceToHost], ids=["h2d", "d2h"])
def bench_transfer(direction, nbytes, pinned):
    return direction(nbytes=nbytes, pinned=pinned)
