# SPDX-License-Identifier: Apache-2.0
"""A request's text, token by token, as the server's own process knows it."""

from __future__ import annotations

from typing import Any

#: Tokens turned to text at a time: a long prompt must not hold the server up.
AT_ONCE = 2048

# Tokens before a new one that decide whether a space goes in front of it.
_CONTEXT = 6
# A character is at most so many tokens of single bytes.
_LONGEST = 4


def tokens_of(engine_client: Any, request_id: str) -> list[int] | None:
    """Prompt and answer so far; None if this process does not serve the request as text."""
    states = getattr(getattr(engine_client, "output_processor", None), "request_states", {})
    state = states.get(request_id)
    if state is None or state.prompt_token_ids is None:
        return None
    answer = state.detokenizer.output_token_ids if state.detokenizer else []
    return [*state.prompt_token_ids, *answer]


class Words:
    """The texts of a growing list of tokens, one for each; put together they are the whole text.

    A character that needs several tokens stands with the last of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pieces: list[str] = []
        self._open = 0  # tokens at the end that are not a whole character yet

    def read(self, tokens: list[int]) -> None:
        """Take in some more of the tokens, at most `AT_ONCE`."""
        for end in range(len(self.pieces) + 1, min(len(tokens), len(self.pieces) + AT_ONCE) + 1):
            self.pieces.append(self._piece(tokens, end))

    def _piece(self, tokens: list[int], end: int) -> str:
        new = end - 1 - self._open
        start = max(0, new - _CONTEXT)
        before = self._decode(tokens[start:new])
        text = self._decode(tokens[start:end])[len(before) :]
        if text.endswith("\ufffd") and self._open + 1 < _LONGEST:
            self._open += 1
            return ""
        self._open = 0
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return text
