# SPDX-License-Identifier: Apache-2.0
"""A tokenizer with a token for each character, and one that prompts start with."""


class Letters:
    """What the tasks and the endpoint need of a tokenizer."""

    bos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.bos_token_id] * add_special_tokens + [ord(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in ids if token)
