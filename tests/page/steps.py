# SPDX-License-Identifier: Apache-2.0
"""Steps as a scheduler sends them, and the answers of workers that carry them out."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from entropykv_vllm.plan.request import AS_SERVED, Control
from entropykv_vllm.plan.schedule import TierPlan
from entropykv_vllm.serving.view import GroupView, View

PLAN = TierPlan("all", 16, 16, 64, 128, 64, 0.5, 4)


def step(
    new: Mapping[str, tuple[int, int, int]] | None = None,
    more: Mapping[str, tuple[int, int]] | None = None,
    finished: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
):
    """A step.

    `new` requests by their prompts, prefix hits, and tokens of the step; `more` tokens of others by
    where they begin, and how many.
    """
    new, more = new or {}, more or {}
    tokens = {name: count for name, (*_, count) in (*new.items(), *more.items())}
    return SimpleNamespace(
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_len=prompt, num_computed_tokens=hit)
            for name, (prompt, hit, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(more), num_computed_tokens=[start for start, _ in more.values()]
        ),
        num_scheduled_tokens=tokens,
    )


def view(layers=(0, 1), plan: TierPlan = PLAN, asked: Control = AS_SERVED) -> View:
    """A worker with two heads and one page group, whose requests all ask for the same."""
    return View({0: GroupView(plan, layers, 2, ())}, lambda *_: None, lambda _: asked)


class FakeEngine:
    """vLLM's `EngineClient`, as far as the page asks it: every worker answers with a view's."""

    def __init__(self, *views: View, texts: Mapping[str, list[int]] | None = None) -> None:
        self.views, self.questions = views, 0
        self.fails = False
        states = {
            name: SimpleNamespace(prompt_token_ids=ids, detokenizer=None)
            for name, ids in (texts or {}).items()
        }
        self.output_processor = SimpleNamespace(request_states=states)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="<b>m</b>"),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            cache_config=SimpleNamespace(num_gpu_blocks=100),
        )

    async def collective_rpc(self, method: str, timeout=None, args=(), kwargs=None) -> list:
        self.questions += 1
        if self.fails:
            raise RuntimeError("the engine is dead")
        return [getattr(view, method.removeprefix("entropykv_"))(*args) for view in self.views]

    def get_tokenizer(self):
        return SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))


def ran(*views: View, tokens: int, name: str = "r", interval: int = PLAN.interval) -> None:
    """Let a request of so many tokens be read, an interval at a time."""
    for one in views:
        one.note(step(new={name: (tokens, 0, min(tokens, interval))}))
        for start in range(interval, tokens, interval):
            one.note(step(more={name: (start, min(interval, tokens - start))}))
