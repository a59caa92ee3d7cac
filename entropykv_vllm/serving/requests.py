# SPDX-License-Identifier: Apache-2.0
"""Requests that ask for something of their own, as they come into a server.

vLLM hands `vllm_xargs` on without looking at it. What is wrong with ours must be said before an
answer begins to stream, so vLLM's renderer is wrapped, which turns a request into tokens; and its
input processor, through which requests come that have no such renderer. What brings tokens with it
passes the renderer too, with all that is asked for in its sampling parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine.input_processor import InputProcessor

from entropykv_vllm.config import request as wishes
from entropykv_vllm.plan.request import AS_SERVED, Control
from entropykv_vllm.serving.messages import message_span
from entropykv_vllm.serving.room import check_room
from entropykv_vllm.serving.settings import evicts, settings_of

_MARK = "_entropykv_requests"
_BEAMS = (
    "beam search makes requests of its own, which ask for nothing: leave kv_eviction, kv_keep and "
    "kv_protect out, or use_beam_search"
)
_RENDERS = ("render_chat", "render_responses", "render_completion")


def install() -> None:
    """Wrap what turns requests into tokens, once."""
    if getattr(InputProcessor, _MARK, False):
        return
    setattr(InputProcessor, _MARK, True)
    for name in _RENDERS:
        setattr(OnlineRenderer, name, _rendering(getattr(OnlineRenderer, name)))
    OnlineRenderer.preprocess_completion = _taking(OnlineRenderer.preprocess_completion)
    InputProcessor.process_inputs = _processing(InputProcessor.process_inputs)


def _rendering(render: Callable) -> Callable:
    @functools.wraps(render)
    async def wrapper(self: OnlineRenderer, request: Any, *args, **kwargs):
        rendered = await render(self, request, *args, **kwargs)
        extra = getattr(request, "vllm_xargs", None)
        prompts = _prompts(rendered)
        if not wishes.asked(extra) or prompts is None:
            return rendered
        # Not into the cache of images: the engine's mirrors it, and sees none of these prompts.
        again = functools.partial(render, self, *args, **{**kwargs, "skip_mm_cache": True})
        try:
            await _look(self, request, prompts, again)
        except VLLMValidationError as error:
            # Returned as vLLM's own refusals are: what is raised here some routes log as a crash.
            return self.create_error_response(error)
        return rendered

    return wrapper


async def _look(
    renderer: OnlineRenderer, request: Any, prompts: Sequence[Any], render: Callable
) -> None:
    """Check what a request asks for, for each of its prompts."""
    await _place_messages(request, prompts, render)
    for prompt in prompts:
        asked = check(renderer.renderer.config, request.vllm_xargs, _length(prompt))
        if asked != AS_SERVED and getattr(request, "use_beam_search", False):
            raise VLLMValidationError(_BEAMS)


def _taking(take: Callable) -> Callable:
    """Tokens that come with sampling parameters, as in `/inference/v1/generate`."""

    @functools.wraps(take)
    async def wrapper(self: OnlineRenderer, request: Any, *args, **kwargs):
        prompts = await take(self, request, *args, **kwargs)
        params = getattr(request, "sampling_params", None)
        if isinstance(params, SamplingParams):
            for prompt in prompts:
                check(self.renderer.config, params.extra_args, _length(prompt))
        return prompts

    return wrapper


def _processing(process_inputs: Callable) -> Callable:
    @functools.wraps(process_inputs)
    def wrapper(self: InputProcessor, *args, **kwargs):
        request = process_inputs(self, *args, **kwargs)
        params = request.sampling_params
        if isinstance(params, SamplingParams):
            tokens = length_from_prompt_token_ids_or_embeds(
                request.prompt_token_ids, request.prompt_embeds
            )
            check(self.vllm_config, params.extra_args, tokens)
        return request

    return wrapper


def check(config: VllmConfig, extra: Mapping[str, Any] | None, tokens: int) -> Control:
    """What a request asks for, by its extra arguments and the tokens of its prompt.

    Raises:
        VLLMValidationError: if it cannot be had, in words; HTTP 400.
    """
    settings = settings_of(config) if evicts(config) else None
    try:
        control = wishes.read(extra, settings, tokens)
        if settings is not None:
            check_room(config, control, tokens)
    except ValueError as error:
        raise VLLMValidationError(str(error)) from None
    return control


async def _place_messages(request: Any, prompts: Sequence[Any], render: Callable) -> None:
    """Put spans of tokens in the place of messages' indices."""
    extra = request.vllm_xargs
    try:
        entries = wishes.entries_of(wishes.asked(extra).get(wishes.PROTECT, []))
        indices = {i for entry in entries if (i := wishes.message_index(entry)) is not None}
        if not indices or not getattr(request, "messages", None):
            return
        spans = {i: await message_span(request, i, _tokens(prompts[0]), render) for i in indices}
    except ValueError as error:
        raise VLLMValidationError(str(error)) from None
    # By kind, not by value: 0.0 is equal to an index and "" looks as if it had no tokens.
    placed = [_placed(entry, spans) for entry in entries]
    request.vllm_xargs = {**extra, wishes.PROTECT: [x for part in placed for x in part]}


def _placed(entry: Any, spans: Mapping[int, str]) -> list[Any]:
    """An entry with a span for an index; a message without tokens has none."""
    index = wishes.message_index(entry)
    if index is None:
        return [entry]
    return [spans[index]] if spans[index] else []


def _prompts(rendered: Any) -> list[Any] | None:
    """The prompts in what one of vLLM's renderers returns; None if that is an error."""
    if isinstance(rendered, tuple):
        return rendered[1]
    if isinstance(rendered, list):
        return rendered
    prompt = getattr(rendered, "engine_input", None)
    return None if prompt is None else [prompt]


def _tokens(prompt: Mapping[str, Any]) -> Sequence[int]:
    return prompt.get("prompt_token_ids") or ()


def _length(prompt: Mapping[str, Any]) -> int:
    """Tokens of a prompt, which may be given as embeddings."""
    tokens = _tokens(prompt)
    return len(tokens) if tokens else len(prompt.get("prompt_embeds", ()))
