# SPDX-License-Identifier: Apache-2.0
"""A SentencePiece BPE tokenizer from the vocabulary that a GGUF file carries.

The file has pieces, scores and types, but no merges. The score of a piece says how early it is
made, so each way to cut a piece into two others is a merge, ranked by the score of the piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Types of pieces, as SentencePiece and GGUF number them.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
SPACE = "▁"


def merges(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every cut of a piece into two others, best score of the piece first."""
    known = set(pieces)
    order = sorted(range(len(pieces)), key=lambda i: -scores[i])
    cuts = ((pieces[i][:at], pieces[i][at:]) for i in order for at in range(1, len(pieces[i])))
    return [(left, right) for left, right in cuts if left in known and right in known]


def tokenizer(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], bos: str
) -> Any:
    """Build a `tokenizers.Tokenizer`: byte fallback, spaces as `▁`, `bos` before each text.

    Args:
        pieces: the vocabulary, by id.
        scores: of each piece; higher is merged earlier.
        types: of each piece, as SentencePiece numbers them.
        bos: the piece that starts a text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    # Pieces of other types are found before anything is merged, and are never parts of a merge.
    normal = [i for i, kind in enumerate(types) if kind == NORMAL]
    ranked = merges([pieces[i] for i in normal], [scores[i] for i in normal])
    ids = {piece: i for i, piece in enumerate(pieces)}
    built = Tokenizer(models.BPE(ids, ranked, byte_fallback=True, fuse_unk=True))
    built.normalizer = normalizers.Replace(" ", SPACE)
    built.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    added = {CONTROL: True, USER_DEFINED: False}
    built.add_tokens(
        # Runs of spaces are user-defined pieces too, so those are looked for after `normalizer`.
        [
            AddedToken(piece, special=added[kind], normalized=not added[kind])
            for piece, kind in zip(pieces, types, strict=True)
            if kind in added
        ]
    )
    built.post_processor = processors.TemplateProcessing(
        f"{bos} $A", f"{bos} $A {bos}:1 $B:1", [(bos, ids[bos])]
    )
    return built
