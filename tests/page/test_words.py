# SPDX-License-Identifier: Apache-2.0
"""Text token by token: put together it is the text, whatever a token holds of a character."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from entropykv_vllm.page import words
from entropykv_vllm.page.words import Words, tokens_of

#: A token for each byte.
BYTES = SimpleNamespace(decode=lambda ids, **_: bytes(ids).decode(errors="replace"))
#: Words whose first space is lost when they are decoded alone, as with SentencePiece.
PIECES = ["▁one", "▁two", "s", "▁", "."]
SPACES = SimpleNamespace(
    decode=lambda ids, **_: "".join(PIECES[i] for i in ids).replace("▁", " ").removeprefix(" ")
)


def read(tokenizer, tokens: list[int]) -> list[str]:
    reader = Words(tokenizer)
    for end in (len(tokens) // 2, len(tokens)):
        while len(reader.pieces) < end:
            reader.read(tokens[:end])
    return reader.pieces


@given(st.text())
def test_pieces_of_bytes_are_the_text(text):
    tokens = list(text.encode())
    pieces = read(BYTES, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text


@given(st.lists(st.integers(0, len(PIECES) - 1), min_size=1))
def test_spaces_stand_where_the_whole_text_has_them(tokens):
    assert "".join(read(SPACES, tokens)) == SPACES.decode(tokens)


def test_bytes_that_are_no_character_do_not_hold_up_the_rest():
    assert "".join(read(BYTES, [0xFF] * 9 + list(b"abc"))).endswith("abc")


def test_a_long_prompt_is_read_in_parts():
    reader = Words(BYTES)
    reader.read([65] * (words.AT_ONCE + 5))
    assert len(reader.pieces) == words.AT_ONCE


def test_tokens_are_those_of_the_servers_own_requests():
    state = SimpleNamespace(
        prompt_token_ids=[1, 2], detokenizer=SimpleNamespace(output_token_ids=[3])
    )
    embedded = SimpleNamespace(prompt_token_ids=None, detokenizer=None)
    states = {"r": state, "e": embedded}
    engine = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
    assert tokens_of(engine, "r") == [1, 2, 3]
    assert tokens_of(engine, "e") is tokens_of(engine, "other") is None
    assert tokens_of(SimpleNamespace(), "r") is None
