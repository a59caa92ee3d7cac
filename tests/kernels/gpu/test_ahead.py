# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for the GPUs that it is meant for, as it is launched.

Shown with ``pytest -s``: registers of a thread, its stack, shared memory of a program.
"""

import pytest
import torch

pytest.importorskip("triton")

from entropykv_vllm.kernels.formats import cold_capacity
from entropykv_vllm.kernels.gpu import (
    attention_decode,
    attention_prefill,
    collapse,
    pack,
    pages,
    token_scores,
    write,
)
from tests.kernels.gpu.ahead import CUOBJDUMP, Recorder

if not CUOBJDUMP.exists():
    pytest.skip("this build of Triton has no tools for CUDA", allow_module_level=True)

PAGE, HEADS = 32, 2


def new_cache(dtype, head_size):
    return torch.zeros(10, HEADS, PAGE, 2 * head_size, dtype=dtype)


def attend(cache, bits, group):
    """Launch both kinds of attention."""
    query = torch.zeros(9, HEADS * group, cache.shape[3] // 2, dtype=cache.dtype)
    starts, table = torch.tensor([0, 1, 9]).int(), torch.zeros(2, 16).int()
    lengths = torch.ones(2).int(), torch.full((2,), 9).int()
    batch = query, cache, query, starts, table, *lengths, bits, 0.125, 0.0, None
    shape = len(starts) - 1, *query.shape[1:], query.device
    attention_decode.decode(*batch, attention_decode.new_workspace(*shape))
    attention_prefill.prefill(*batch, 8)


def move(cache, bits, policy):
    """Launch a collapse of hot pages."""
    keep = cold_capacity(cache, bits)
    src = torch.arange(-(-keep // PAGE) + 2)[None]
    options = policy, "token", "head", 16, bits
    collapse.collapse([cache, cache.clone()], src, src[:, :1], torch.tensor([4]), *options)


def store(cache):
    tokens = torch.zeros(5, HEADS, cache.shape[3] // 2, dtype=cache.dtype)
    write.write(tokens, tokens, cache, torch.arange(5))


def of_attention(kernel, bits, head_size, group=4):
    return kernel, lambda dtype: attend(new_cache(dtype, head_size), bits, group)


def of_moves(kernel, bits, policy="norm"):
    return kernel, lambda dtype: move(new_cache(dtype, 128), bits, policy)


DECODE, PREFILL = attention_decode.split_attention, attention_prefill.attend_blocks
SMALL = {
    "decode-4-128": of_attention(DECODE, 4, 128),
    "decode-16-128": of_attention(DECODE, 16, 128),
    "merge": of_attention(attention_decode.merge_splits, 4, 128),
    "prefill-4-128": of_attention(PREFILL, 4, 128),
    "write": (write.store_tokens, lambda dtype: store(new_cache(dtype, 128))),
    "pack-4": of_moves(pack.pack_tokens, 4),
}
LARGE = {
    "decode-8-128": of_attention(DECODE, 8, 128),
    "decode-4-128-7": of_attention(DECODE, 4, 128, 7),
    "decode-4-64": of_attention(DECODE, 4, 64),
    "decode-16-64": of_attention(DECODE, 16, 64),
    "prefill-16-128": of_attention(PREFILL, 16, 128, 7),
    "pack-8": of_moves(pack.pack_tokens, 8),
    "measure": of_moves(token_scores.measure, 4, "entropykv"),
    "sum-units": of_moves(token_scores.sum_units, 4, "entropykv"),
    "copy": of_moves(pages.copy_heads, 4),
}
WIDE = {
    "decode-4-256-16": of_attention(DECODE, 4, 256, 16),
    "decode-16-256-16": of_attention(DECODE, 16, 256, 16),
    "prefill-4-256": of_attention(PREFILL, 4, 256),
    "prefill-8-256": of_attention(PREFILL, 8, 256, 8),
    "prefill-16-256-16": of_attention(PREFILL, 16, 256, 16),
}
#: Bytes of shared memory that a program may have.
SHARED = {75: 64 << 10, 80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
#: What runs for each token, or reads all pages of a move: none of it may spill, but for WIDE.
TIGHT = ("decode", "pack", "measure")


def cases():
    sets = {75: SMALL | WIDE, 80: SMALL | LARGE, 89: WIDE, 90: SMALL | LARGE | WIDE, 100: SMALL}
    sets[120] = WIDE
    for capability, some in sets.items():
        for name, launch in some.items():
            yield pytest.param(capability, name, *launch, id=f"sm_{capability}-{name}")


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("capability", "name", "kernel", "launch"), [*cases()])
def test_compiles(capability, name, kernel, launch, monkeypatch, tmp_path):
    for other in {x for x, _ in (SMALL | LARGE).values()} - {kernel}:
        Recorder(monkeypatch, other)
    monkeypatch.setattr(attention_prefill, "is_turing", lambda device: capability < 80)
    recorder = Recorder(monkeypatch, kernel)
    # sm_75 has no arithmetic on bfloat16.
    launch(torch.float16 if capability < 80 else torch.bfloat16)
    made = recorder.compile(capability, tmp_path)
    print(
        f"\nsm_{capability} {name}: {made.registers} registers, {made.stack} bytes of stack,",
        end="",
    )
    print(f" {made.shared} of shared memory")
    assert made.cubin[:4] == b"\x7fELF"
    assert made.shared <= SHARED[capability]
    if capability in (80, 90) and name.startswith(TIGHT) and name not in WIDE:
        assert made.stack == 0


def test_moves_without_number_fit_a_grid(monkeypatch):
    """A GPU takes 2^31 programs along the first dimension, and 65,535 along the others."""
    moves, cache = 70_000, torch.zeros(3, 1, 16, 32)
    src = torch.tensor([[0, 1]]).expand(moves, -1).contiguous()
    kernels = pack.pack_tokens, pages.copy_heads, token_scores.measure, token_scores.sum_units
    recorders = [Recorder(monkeypatch, kernel) for kernel in kernels]
    options = "entropykv", "token", "head", 16, 16
    # On the device moves are not looked at; these depend on each other, and none is carried out.
    monkeypatch.setattr(collapse, "_independent", lambda src, dst: [slice(0, len(src))])
    collapse.collapse([cache], src, src[:, :1], torch.zeros(moves).long(), *options)
    for recorder in recorders:
        (grid,) = recorder.grids
        assert grid[0] >= moves
        assert max(grid[1:]) <= 65_535


def test_turing_is_known_by_its_compute_capability(monkeypatch):
    found = {0: (7, 5), 1: (8, 0)}
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: found[device.index])
    known = attention_prefill.is_turing.__wrapped__
    assert [known(torch.device(x)) for x in ("cuda:0", "cuda:1", "cpu")] == [True, False, False]
    rows = attention_prefill.rows_of
    assert [rows(4, 64, False), rows(4, 64, True), rows(4, 128, False), rows(4, 128, True)] == [
        *(64, 32, 32, 16)
    ]
    assert rows(71, 64, True) == 128
