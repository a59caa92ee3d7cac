# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from SentencePiece vocabularies, held to SentencePiece itself."""

import random

import pytest

from entropykv_vllm.model import spm

pytest.importorskip("tokenizers")

BYTE = 6
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
ADDED = ["\n", "\n\n", "  ", "   ", "<td>"]
MERGED = ["th", "he", "▁t", "▁the", "the", "in", "▁th", "ing", "er", "▁i", "ere", "▁in", "her"]
LETTERS = ["▁", *"etainhrg<>d."]


def vocabulary():
    """A tiny Gemma: pieces, scores and types."""
    pieces = SPECIAL + ADDED + [f"<0x{i:02X}>" for i in range(256)] + MERGED + LETTERS
    types = (
        [spm.CONTROL] * len(SPECIAL)
        + [spm.USER_DEFINED] * len(ADDED)
        + [BYTE] * 256
        + [spm.NORMAL] * len(MERGED + LETTERS)
    )
    scores = [0.0] * (len(pieces) - len(MERGED + LETTERS))
    return pieces, scores + [-float(i) for i in range(len(MERGED + LETTERS))], types


@pytest.fixture(scope="module")
def built():
    return spm.tokenizer(*vocabulary(), bos="<bos>")


@pytest.fixture(scope="module")
def oracle():
    """SentencePiece with the same vocabulary."""
    sentencepiece = pytest.importorskip("sentencepiece")
    protocol = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = protocol.ModelProto()
    for piece, score, kind in zip(*vocabulary(), strict=True):
        unknown = 2 if piece == "<unk>" else kind
        model.pieces.add(piece=piece.replace(" ", spm.SPACE), score=score, type=unknown)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = 2, True
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = range(4)
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def texts(count):
    letters = [*"etainhrg<>d.", " ", " ", " ", "\n", "é", "🙂", "7", "the", "<td>", "ing"]
    draw = random.Random(0)
    return ["".join(draw.choices(letters, k=draw.randrange(60))) for _ in range(count)]


def test_encodes_as_sentencepiece_does(built, oracle):
    for text in texts(500):
        assert built.encode(text, add_special_tokens=False).ids == oracle.encode(text), text


@pytest.mark.parametrize(
    "text",
    ["in there", "  there\n\n  ing ", "r 1234567.\n\n\nin", "é🙂", "<td>the<td>", "", *texts(50)],
)
def test_decodes_what_it_encoded(built, text):
    assert built.decode(built.encode(text).ids) == text


def test_a_text_starts_with_bos(built):
    assert built.encode("the in").tokens == ["<bos>", "the", "▁in"]


def test_runs_of_spaces_and_newlines_are_single_pieces(built):
    tokens = built.encode("the   in\n\nthe", add_special_tokens=False).tokens
    assert tokens == ["the", 3 * spm.SPACE, "in", "\n\n", "the"]


def test_what_is_not_in_the_vocabulary_becomes_bytes(built):
    assert built.encode("é", add_special_tokens=False).tokens == ["<0xC3>", "<0xA9>"]


def test_merges_follow_the_scores_of_what_they_make():
    pieces, scores = ["a", "b", "c", "bc", "ab", "abc"], [-9, -9, -9, -1, -2, -3]
    assert spm.merges(pieces, scores) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]
