# SPDX-License-Identifier: Apache-2.0
"""The emulation of a GPU notices what would go wrong on one."""

import ctypes
import shutil
from pathlib import Path

import pytest

from tests.kernels.emulated import EMULATION, build

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
THREADS, SEEDS = 64, range(20)
SHARED = 4 * THREADS


@pytest.fixture(scope="module")
def library():
    sources = [Path(__file__).with_name("barriers.cpp"), EMULATION / "fibers.cpp"]
    found = ctypes.CDLL(str(build(sources=sources, depends=[EMULATION / "cuda.h"])))
    found.run.restype = ctypes.c_char_p
    return found


def results(library, name, blocks=1):
    """What a kernel writes, seed by seed."""
    found = []
    for seed in SEEDS:
        # Vectors of 16 bytes fit.
        room = (ctypes.c_int * (THREADS + 4))()
        out = ctypes.addressof(room) + -ctypes.addressof(room) % 16
        library.emulation_seed(ctypes.c_uint64(seed))
        assert library.run(name.encode(), blocks, SHARED, ctypes.c_void_p(out)) == b""
        found.append(list((ctypes.c_int * THREADS).from_address(out)))
    return found


def test_a_barrier_makes_threads_see_what_the_others_wrote(library):
    assert all(found == [*range(THREADS)][::-1] for found in results(library, "reverse"))


def test_a_missing_barrier_is_seen(library):
    assert all(found != [*range(THREADS)][::-1] for found in results(library, "forgets a barrier"))


def test_blocks_that_rely_on_their_order_are_seen(library):
    found = results(library, "chain", blocks=6)
    assert any(some[:6] != [*range(6)] for some in found)
    assert len({tuple(some) for some in found}) > 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hang", "threads wait at barriers that others do not come to"),
        ("leave", "a lane has left before its warp exchanged numbers"),
        ("overrun", "a block has written beyond its shared memory"),
        ("misalign", "a vector of 16 bytes at an odd address"),
    ],
)
def test_mistakes_have_names(library, name, message):
    out = ctypes.create_string_buffer(4 * THREADS)
    assert message in library.run(name.encode(), 1, SHARED, out).decode()


@pytest.mark.parametrize(("blocks", "shared"), [(0, SHARED), (1, (48 << 10) + 1)])
def test_what_a_gpu_would_not_start_is_seen(library, blocks, shared):
    out = ctypes.create_string_buffer(4 * THREADS)
    assert b"a GPU refuses" in library.run(b"reverse", blocks, shared, out)
    assert library.run(b"reverse", 1, 48 << 10, out) == b""
