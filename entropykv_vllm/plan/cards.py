# SPDX-License-Identifier: Apache-2.0
"""What a card leaves for pages: its share for vLLM, less the weights and the work space."""

from __future__ import annotations

from dataclasses import dataclass

from entropykv_vllm.plan.model_shape import ModelShape

#: The cards that people have, in bytes. 8 GB are 8,000,000,000: drivers show a little more.
CARDS = tuple(size * 10**9 for size in (8, 12, 16, 24, 80))

#: CUDA graphs, the kernels' own work space and what the allocator cannot use, in bytes.
FIXED = 500_000_000

#: Bytes that sampling takes for each request and word of the vocabulary: logits, sorted logits and
#: their indices, probabilities and their sums.
SAMPLING = 40


@dataclass(frozen=True)
class Serving:
    """The flags of a server that decide what is left for pages.

    Attributes:
        utilization: vLLM's --gpu-memory-utilization.
        step_tokens: vLLM's --max-num-batched-tokens.
        requests: vLLM's --max-num-seqs.
        overhead: bytes for activations and CUDA; None for an estimate.
    """

    utilization: float = 0.9
    step_tokens: int = 2048
    requests: int = 32
    overhead: int | None = None


def activation_bytes(shape: ModelShape, serving: Serving) -> int:
    """The most that a step takes beside weights and pages: in its widest layer, or in sampling.

    An estimate, in 16 bits: a layer's MLP has its two inputs and their product, and the residual
    and three tensors of its size are alive beside them. vLLM measures its own when it starts.
    """
    experts = shape.experts
    wide = experts.chosen * experts.mlp + experts.shared if experts else shape.mlp
    copies = 4 + (experts.chosen if experts else 0)
    layer = 2 * serving.step_tokens * (3 * wide + copies * shape.hidden)
    return max(layer, SAMPLING * serving.requests * shape.vocabulary)


def overhead_bytes(shape: ModelShape, serving: Serving) -> int:
    """Bytes for activations and CUDA."""
    if serving.overhead is not None:
        return serving.overhead
    return FIXED + activation_bytes(shape, serving)


def room_bytes(card: int, weights: int, overhead: int, serving: Serving) -> int:
    """Bytes left for pages on a card; below 0 if weights and work space alone do not fit."""
    return int(card * serving.utilization) - weights - overhead
