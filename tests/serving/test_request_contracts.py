# SPDX-License-Identifier: Apache-2.0
"""What per-request control relies on inside vLLM, in each release that is supported."""

import pytest

from .sources import RELEASES, Sources, sources


@pytest.fixture(scope="module", params=RELEASES)
def vllm(request) -> Sources:
    return sources(request.param)


def test_a_renderer_turns_requests_into_tokens(vllm):
    """Each takes the request first, and what it returns holds the prompts."""
    module = "renderers.online_renderer"
    for name in ("render_chat", "render_responses", "render_completion"):
        path = f"OnlineRenderer.{name}"
        assert vllm.parameters(module, path)[:2] == ["self", "request"]
        assert "skip_mm_cache" in vllm.parameters(module, path)
    vllm.says(module, "OnlineRenderer.render_chat", "return conversation, engine_inputs")
    vllm.says(module, "OnlineRenderer.render_completion", "return engine_inputs")
    vllm.says(module, "OnlineRenderer._responses_render_result", "engine_input=engine_inputs[0]")
    vllm.says("renderers.base", "BaseRenderer.__init__", "self.config = config")


def test_extra_arguments_are_read_after_rendering(vllm):
    """So spans that take the place of messages' indices reach the engine."""
    chat = "entrypoints.openai.chat_completion"
    vllm.says(f"{chat}.protocol", "ChatCompletionRequest.to_sampling_params", "self.vllm_xargs")
    create = "OpenAIServingChat._create_chat_completion"
    vllm.says(f"{chat}.serving", create, "render_chat_request(request)", "to_sampling_params(")


def test_tokens_that_come_with_parameters_pass_the_renderer_before_an_answer_begins(vllm):
    module = "entrypoints.scale_out.token_in_token_out.serving"
    vllm.says(
        module,
        "ServingTokens.serve_tokens",
        "await self.online_renderer.preprocess_completion( request,",
        "self.engine_client.generate(",
    )
    vllm.says("renderers.online_renderer", "OnlineRenderer.preprocess_completion", "return await")
    router = "entrypoints.scale_out.token_in_token_out.api_router"
    vllm.says(router, "generate", "await handler.serve_tokens(", "StreamingResponse(")


def test_what_a_renderer_refuses_it_may_return(vllm):
    """As our refusals are."""
    vllm.says("renderers.online_renderer", "OnlineRenderer.create_error_response", "message: str |")
    serving = "entrypoints.openai"
    for name, path in {
        "chat_completion": "OpenAIServingChat._create_chat_completion",
        "completion": "OpenAIServingCompletion._create_completion",
        "responses": "OpenAIServingResponses._create_responses",
    }.items():
        vllm.says(f"{serving}.{name}.serving", path, "ErrorResponse): return ")


def test_all_requests_pass_the_input_processor(vllm):
    module, path = "v1.engine.input_processor", "InputProcessor.process_inputs"
    vllm.says(module, path, "EngineCoreRequest(", "sampling_params=sampling_params")


def test_the_list_of_a_requests_hashes_reaches_the_lookup_as_it_is(vllm):
    """It carries what the request asked for."""
    manager = "KVCacheManager.get_computed_blocks"
    vllm.says("v1.core.kv_cache_manager", manager, "request.block_hashes, max_cache_hit_length")
    for kind in ("UnitaryKVCacheCoordinator", "HybridKVCacheCoordinator"):
        path = f"{kind}.find_longest_cache_hit"
        vllm.says("v1.core.kv_cache_coordinator", path, "block_hashes=block_hashes")


def test_a_request_names_its_blocks_with_a_function_of_its_own(vllm):
    path = "Request.update_block_hashes"
    vllm.says("v1.request", path, "self.block_hashes.extend(self._block_hasher(self))")
    hasher = "get_request_block_hasher"
    vllm.says("v1.core.kv_cache_utils", hasher, "len(request.block_hashes) * hash_block_size")
    vllm.says("v1.core.kv_cache_utils", hasher, "request.block_hashes[-1]")


def test_the_pages_of_all_engines_are_added_up(vllm):
    """`serving.room` divides them again."""
    module = "v1.engine.core_client"
    text = vllm.source(module)
    assert "num_gpu_blocks += response.num_gpu_blocks" in text, vllm.version
    vllm.says("v1.core.sched.scheduler", "Scheduler.__init__", "self.scheduler_config.watermark")
    manager = "KVCacheManager.__init__"
    vllm.says("v1.core.kv_cache_manager", manager, "int(watermark * kv_cache_config.num_blocks)")
    path = "Scheduler.add_request"
    vllm.says("v1.core.sched.scheduler", path, "self.requests[request.request_id] = request")
