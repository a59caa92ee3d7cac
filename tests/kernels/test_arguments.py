# SPDX-License-Identifier: Apache-2.0
"""Whatever the native ops are called with, they refuse it or stay within their tensors' memory."""

import ctypes
import math
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.kernels import native
from tests.kernels.paged import examples

if not native.load():
    pytest.skip("the native kernels are not built", allow_module_level=True)
ops = torch.ops.entropykv

PAGES, HEADS, PAGE, DIM, QUERY_HEADS = 3, 2, 16, 32, 4
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
# Tokens of the longest page, few of which are more than what an int can count.
LONG = 1 << 16


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def attention_arguments():
    """Two requests: a cold page and 5 hot tokens, of which 3 are new; 17 hot ones, the last new."""
    query = torch.randn(4, QUERY_HEADS, DIM)
    return {
        "query": query,
        "cache": torch.randn(PAGES, HEADS, PAGE, 2 * DIM),
        "output": torch.zeros_like(query),
        "starts": ints(0, 3, 4),
        "table": ints([0, 1], [1, 2]),
        "cold": ints(1, 0),
        "hot": ints(5, 17),
        "bits": 16,
        "scale": 0.2,
        "softcap": 0.0,
        "sinks": torch.randn(QUERY_HEADS),
    }


def observe_arguments():
    arguments = attention_arguments()
    del arguments["output"]
    mass = torch.zeros(PAGES, HEADS, PAGE)
    return arguments | {"mass": mass, "first": ints(0, 0), "fresh": ints(1, 0)}


def write_arguments():
    keys, values = torch.randn(2, 4, HEADS, DIM)
    cache = torch.zeros(PAGES, HEADS, PAGE, 2 * DIM)
    return {"key": keys, "value": values, "cache": cache, "slots": torch.tensor([0, 40, -1, 7])}


def drop_arguments():
    return {
        "cache": torch.randn(PAGES, HEADS, PAGE, 2 * DIM),
        "src": torch.tensor([[0, 1], [1, 2]]),
        "dst": torch.tensor([[2], [0]]),
        "sinks": torch.tensor([0, 4]),
        "policy": "entropykv",
        "bits": 16,
        "scores": torch.randn(2, HEADS, 2 * PAGE),
        "side": torch.randn(PAGES, HEADS, PAGE),
    }


def collapse_arguments():
    return drop_arguments() | {"granularity": "token", "scope": "layer", "from_bits": 16}


ARGUMENTS = {
    "attention": attention_arguments,
    "observe": observe_arguments,
    "write": write_arguments,
    "drop": drop_arguments,
    "collapse": collapse_arguments,
}
each_op = pytest.mark.parametrize("name", ARGUMENTS)
with_requests = pytest.mark.parametrize("name", ["attention", "observe"])
with_moves = pytest.mark.parametrize("name", ["drop", "collapse"])


def call(name, arguments):
    return getattr(ops, name)(**arguments)


def refusal(name, arguments):
    """What a call is refused with, if it is."""
    try:
        call(name, arguments)
    except RuntimeError as error:
        return str(error)


def refuses(name, message, **wrong):
    with pytest.raises(RuntimeError, match=f"entropykv: .*{message}"):
        call(name, ARGUMENTS[name]() | wrong)


# -- sizes ----------------------------------------------------------------------------------------


@each_op
def test_what_is_right_is_not_refused(name):
    call(name, ARGUMENTS[name]())


@each_op
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((PAGES, 0, PAGE, 2 * DIM), "1 to 65536 heads, not 0"),
        ((0, 2**32 + 2, PAGE, 2 * DIM), "1 to 65536 heads, not 4294967298"),
        ((PAGES, HEADS, 0, 2 * DIM), "not 32 and 0"),
        ((0, HEADS, 2**32 + PAGE, 2 * DIM), "not 32 and 4294967312"),
        ((PAGES, HEADS, PAGE, 0), "not 0 and 16"),
        ((0, HEADS, PAGE, 2**32 + 2 * DIM), "not 2147483680 and 16"),
        ((PAGES, HEADS, PAGE, 33), "not half of 33"),
    ],
)
def test_sizes_of_a_cache_are_refused(name, shape, message):
    strides = [math.prod(shape[i:]) for i in range(1, 5)]
    cache = torch.empty(math.prod(shape)).as_strided(shape, strides)
    refuses(name, message, cache=cache)
    if "bits" in ARGUMENTS[name]():
        refuses(name, message, cache=cache, bits=8)


@pytest.mark.parametrize(
    "sizes",
    [(0, 16, 2, 8), (-16, 16, 2, 8), (64, 0, 2, 4), (64, 2**40, 2, 4), (64, 32, 2, 0)],
)
def test_a_capacity_that_there_is_not_is_refused(sizes):
    with pytest.raises(RuntimeError, match=r"entropykv: .* not "):
        ops.capacity(*sizes)


def test_a_capacity_of_numbers_that_there_are_not_is_refused():
    with pytest.raises(RuntimeError, match="entropykv: numbers have 2 or 4 bytes, not 0"):
        ops.capacity(64, 32, 0, 8)


@with_requests
@pytest.mark.parametrize("heads", [0, HEADS * 65, HEADS * (2**32 + 1)])
def test_query_heads_that_are_none_or_too_many_are_refused(name, heads):
    query = torch.empty(0, heads, DIM)
    wrong = {"query": query, "starts": ints(0), "cold": ints(), "hot": ints(), "sinks": None}
    wrong |= {"output": query} if name == "attention" else {"first": ints(), "fresh": ints()}
    refuses(name, "query heads share a KV head", **wrong)


# -- numbers --------------------------------------------------------------------------------------


@with_requests
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"starts": ints(-3, 0, 4)}, "do not fit each other or the queries"),
        ({"starts": ints(0, 3, 5)}, "do not fit each other or the queries"),
        ({"starts": ints(INT_MIN, INT_MAX, INT_MAX)}, "do not fit each other or the queries"),
        ({"starts": ints(0, INT_MAX, 4)}, "more tokens than pages"),
        ({"starts": ints(3, 0, 4)}, "more tokens than pages"),
        ({"cold": ints(INT_MAX, 0)}, "more tokens than pages"),
        ({"cold": ints(-1, 0)}, "more tokens than pages"),
        ({"hot": ints(INT_MAX, 17)}, "more tokens than pages"),
        ({"hot": ints(INT_MIN, 17)}, "more tokens than pages"),
        ({"hot": ints(2, 17)}, "more tokens than pages"),
        ({"table": ints([0, PAGES], [1, 2])}, "page 3 is outside the cache"),
        ({"table": ints([0, 1], [1, INT_MIN])}, "page -2147483648 is outside the cache"),
    ],
)
def test_numbers_of_requests_are_refused(name, wrong, message):
    refuses(name, message, **wrong)


@with_requests
@pytest.mark.parametrize("kind", ["cold", "hot"])
def test_more_tokens_than_can_be_counted_are_refused(name, kind):
    pages = 2**30 // LONG + 1
    cold, hot = (pages, 0) if kind == "cold" else (0, pages * LONG)
    wrong = {"query": torch.zeros(0, 1, 16), "cache": torch.zeros(1, 1, LONG, 32).half()}
    wrong |= {"starts": ints(0, 0), "table": torch.zeros(1, pages, dtype=torch.int32)}
    wrong |= {"cold": ints(cold), "hot": ints(hot), "sinks": None}
    if name == "attention":
        wrong["output"] = wrong["query"]
    else:
        wrong |= {"mass": torch.zeros(1, 1, LONG), "first": ints(0), "fresh": ints(0)}
    refuses(name, "more than 1073741824 tokens", **wrong)


@with_moves
def test_moves_of_more_tokens_than_can_be_counted_are_refused(name):
    """So many that an int, which counts on from its lowest number, would find them few."""
    src = torch.zeros(1, 2**32 // LONG + 1, dtype=torch.int64)
    cache, one = torch.zeros(1, 1, LONG, 32).half(), torch.tensor([[0]])
    wrong = {"cache": cache, "src": src, "dst": one, "sinks": one[0], "scores": None, "side": None}
    refuses(name, "more than 1073741824 tokens", **wrong)


@with_moves
@pytest.mark.parametrize("page", [-1, PAGES, 2**32, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("which", ["src", "dst"])
def test_pages_of_moves_outside_the_cache_are_refused(name, page, which):
    moves = ARGUMENTS[name]()[which]
    moves[1, -1] = page
    refuses(name, f"page {page} is outside the cache", **{which: moves})


@pytest.mark.parametrize("slot", [PAGES * PAGE, 2**32, 2**63 - 1])
def test_slots_outside_the_cache_are_refused(slot):
    refuses("write", f"slot {slot} is outside the cache", slots=torch.tensor([0, slot]))


@with_moves
@pytest.mark.parametrize("sinks", [-1, -(2**31) - 1, -(2**63)])
def test_a_negative_number_of_sinks_is_none(name, sinks):
    found = []
    for number in (0, sinks):
        torch.manual_seed(0)
        arguments = ARGUMENTS[name]() | {"sinks": torch.tensor([number, number])}
        call(name, arguments)
        found.append(arguments["cache"])
    assert torch.equal(*found)


# -- memory that arguments share ------------------------------------------------------------------


WRITTEN = [("attention", "output"), ("observe", "mass"), ("write", "cache")]
WRITTEN += [(name, written) for name in ("drop", "collapse") for written in ("cache", "side")]


@pytest.mark.parametrize(("name", "written"), WRITTEN)
def test_integers_are_not_written_over(name, written):
    """They are checked before the work begins: what is written over them then was not."""
    arguments = ARGUMENTS[name]()
    for which, t in arguments.items():
        if torch.is_tensor(t) and not t.is_floating_point():
            inside = arguments[written].view(-1).view(t.dtype)[: t.numel()].view(t.shape)
            inside.copy_(t)
            refuses(name, "integers lie in memory", **{written: arguments[written], which: inside})


# -- memory that is not given back ---------------------------------------------------------------


class Heap(ctypes.Structure):
    """What glibc says of its memory: `mallinfo2`."""

    _fields_ = tuple((f"number_{i}", ctypes.c_size_t) for i in range(10))


def in_use():
    """Bytes of the heap that somebody has."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None or "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("needs glibc 2.33, and its own malloc")
    ask.restype = Heap
    return ask().number_7


@with_moves
def test_a_call_gives_back_what_it_takes(name):
    """The strings too, which torch's own conversion does not."""
    none = torch.empty(0, 1, dtype=torch.int64)
    moves = {"src": none, "dst": none, "sinks": none[:, 0], "scores": None}
    arguments = ARGUMENTS[name]() | moves
    call(name, arguments)
    before, calls = in_use(), 2000
    for _ in range(calls):
        call(name, arguments)
    assert in_use() - before < 16 * calls


# -- anything at all ------------------------------------------------------------------------------

FENCE = 512
ODD = [0, 1, -1, 2, 15, 17, 2**16, INT_MAX, INT_MIN, 2**32 + 1, 2**59, 2**63 - 1, -(2**63)]
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64]


class Fenced:
    """Copies of tensors, with bytes around them that nobody may write to."""

    def __init__(self):
        self.memory = []

    def copy(self, t):
        size = t.numel() * t.itemsize
        memory = torch.full((FENCE + size + FENCE,), 0xA5, dtype=torch.uint8)
        self.memory.append(memory)
        inside = memory[FENCE : FENCE + size].view(t.dtype).view(t.shape)
        return inside.copy_(t)

    def whole(self):
        return all((m[:FENCE] == 0xA5).all() and (m[-FENCE:] == 0xA5).all() for m in self.memory)


def with_number(draw, t):
    """One of the numbers is another one."""
    if t.is_floating_point() or not t.numel() or not t.is_contiguous():
        return t
    number = draw(st.sampled_from(ODD))
    limits = torch.iinfo(t.dtype)
    index = draw(st.integers(0, t.numel() - 1))
    t.view(-1)[index] = min(max(number, limits.min), limits.max)
    return t


def expanded(draw, t):
    """One row, as often as one likes: its stride is 0."""
    if not t.dim() or not t.shape[0]:
        return t
    return t[:1].expand(draw(st.sampled_from([0, 1, 2, 4, 2**20, 2**40])), *t.shape[1:])


def cut(draw, t):
    """The first or the last part of a dimension."""
    if not t.dim():
        return t
    dim = draw(st.integers(0, t.dim() - 1))
    start, length = draw(st.integers(0, t.shape[dim])), draw(st.integers(0, 3))
    return t.narrow(dim, start, min(length, t.shape[dim] - start))


WRONG = [
    with_number,
    expanded,
    cut,
    lambda draw, t: t.to(draw(st.sampled_from(TYPES))),
    lambda draw, t: t.transpose(0, -1) if t.dim() else t,
    lambda draw, t: t[None],
    lambda draw, t: t.flatten(),
    lambda draw, t: t[..., ::2] if t.dim() else t,
    lambda draw, t: t.to("meta"),
]


def spoil(draw, arguments):
    """Make one argument odd, or wrong."""
    name = draw(st.sampled_from(sorted(arguments)))
    value = arguments[name]
    if torch.is_tensor(value) and value.numel() > 2**20:
        return  # an expanded one, which must not be copied
    if torch.is_tensor(value):
        arguments[name] = draw(st.sampled_from(WRONG))(draw, value)
    elif isinstance(value, str):
        arguments[name] = draw(st.sampled_from(["", "any", "norm", "head", "block"]))
    elif isinstance(value, int):
        arguments[name] = draw(st.sampled_from(ODD))
    elif isinstance(value, float):
        arguments[name] = draw(st.sampled_from([0.0, -1e300, math.inf, math.nan]))


@each_op
@examples(100)
@given(st.data())
def test_a_call_is_carried_out_or_refused(name, data):
    """The same with bytes that a fuzzer makes up, and without torch: `make fuzz-ops`."""
    fenced, isa = Fenced(), data.draw(st.sampled_from(native.supported()))
    arguments = {
        key: fenced.copy(value) if torch.is_tensor(value) else value
        for key, value in ARGUMENTS[name]().items()
    }
    for _ in range(data.draw(st.integers(0, 3))):
        spoil(data.draw, arguments)
    with native.use(isa):
        message = refusal(name, arguments)
    assert message is None or "entropykv: " in message
    assert fenced.whole()
