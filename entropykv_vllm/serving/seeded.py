# SPDX-License-Identifier: Apache-2.0
"""Seeded sampling of chunked prompts on CPUs.

vLLM draws a token after each chunk of a prompt, throws it away, and then winds a seeded request's
generator back by an offset, which only CUDA's generators have: on a CPU the engine dies. Steps
that end at boundaries make chunked prompts the rule, so generators here can be wound back.
"""

from __future__ import annotations

import torch


class RewindableGenerator(torch.Generator):
    """A CPU generator that goes back to where the step began."""

    @classmethod
    def at(cls, other: torch.Generator) -> RewindableGenerator:
        """A generator in the state of another."""
        generator = cls()
        generator.set_state(other.get_state())
        return generator

    def begin_step(self) -> None:
        self._begin = self.get_state()

    def get_offset(self) -> int:
        """vLLM subtracts what one draw takes from this; only `set_offset` looks at it."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Undo the draws of this step."""
        self.set_state(self._begin)


def install(model_runner) -> None:
    """Give the runner's seeded requests generators that can be wound back."""
    update_states = model_runner._update_states

    def wrapper(scheduler_output):
        result = update_states(scheduler_output)
        batch = model_runner.input_batch
        for row, generator in batch.generators.items():
            if not isinstance(generator, RewindableGenerator):
                generator = RewindableGenerator.at(generator)
                batch.generators[row] = generator
                model_runner.requests[batch.req_ids[row]].generator = generator
            generator.begin_step()
        return result

    model_runner._update_states = wrapper
