# SPDX-License-Identifier: Apache-2.0
"""How long a step takes: a model of three numbers, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from entropykv_vllm.simulation.replica import Step

#: Shares of what a card's maker names that are reached: of its bandwidth, and of its arithmetic.
BANDWIDTH_SHARE, MATRIX_SHARE = 0.8, 0.5

#: Seconds of a step that are no arithmetic and no memory: launches, sampling, the scheduler.
LAUNCH = 0.002


@dataclass(frozen=True)
class Card:
    """What the maker of a card says of it.

    Attributes:
        memory: in bytes.
        bandwidth: of its memory, in bytes a second.
        arithmetic: matrix products in 16 bits, in operations a second.
    """

    name: str
    memory: int
    bandwidth: float
    arithmetic: float


#: One of each size; which one stands for a size is a choice.
CARDS = (
    Card("RTX 4060", 8 * 10**9, 272e9, 30e12),
    Card("RTX 4070", 12 * 10**9, 504e9, 58e12),
    Card("RTX 4080", 16 * 10**9, 717e9, 97e12),
    Card("RTX 4090", 24 * 10**9, 1008e9, 165e12),
    Card("A100 80GB", 80 * 10**9, 2039e9, 312e12),
)


def card_of(memory: int) -> Card:
    """The card that stands for a size: the largest that is not larger, give or take a tenth."""
    fits = [card for card in CARDS if card.memory <= 1.1 * memory]
    return fits[-1] if fits else CARDS[0]


@dataclass(frozen=True)
class Cost:
    """What a step costs.

    Attributes:
        fixed: seconds of a step that decodes, keys and values left aside.
        rate: tokens a second of prompts.
        bandwidth: bytes a second at which keys and values are read.
        page_bytes: bytes of a page.
    """

    fixed: float
    rate: float
    bandwidth: float
    page_bytes: int

    def seconds(self, step: Step) -> float:
        """Seconds of a step: its products, or the weights, then each request's pages."""
        tokens = pages = 0
        for job, count in step.tokens:
            tokens += count
            pages += job.held
        return max(self.fixed, tokens / self.rate) + pages * self.page_bytes / self.bandwidth


@dataclass(frozen=True)
class Steps:
    """Each step costs one, so that steps are counted and not seconds."""

    def seconds(self, step: Step) -> float:
        """One."""
        return 1.0


def estimate(card: Card, parameters: int, weight_bytes: int) -> tuple[float, float, float]:
    """Seconds of a step, tokens a second of prompts and bytes a second, from a card's numbers.

    Args:
        parameters: that a token goes through.
        weight_bytes: bytes of the weights.
    """
    bandwidth = card.bandwidth * BANDWIDTH_SHARE
    fixed = LAUNCH + weight_bytes / bandwidth
    return fixed, card.arithmetic * MATRIX_SHARE / (2 * parameters), bandwidth
