# SPDX-License-Identifier: Apache-2.0
"""The page as vLLM's endpoint plugin: its routes are there if the server evicts and wants it."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.logger import init_logger

from entropykv_vllm.page.guard import Guard
from entropykv_vllm.page.hub import Hub
from entropykv_vllm.page.routes import PATH, router

logger = init_logger("vllm.entropykv")


class Page:
    """Attached by vLLM to each of its API servers."""

    name: ClassVar = "entropykv"
    required_tasks: ClassVar = ("generate",)

    def __init__(self) -> None:
        self.hub: Hub | None = None
        self.about: dict[str, Any] = {}

    def attach_router(self, app: Any) -> None:
        """Add the routes, unless eviction or the page is off."""
        args = app.state.args
        if getattr(args, "kv_eviction", "none") == "none" or not args.kv_eviction_ui:
            return
        self.hub = Hub(None, args.kv_eviction_ui_text, stopping=lambda: _stopping(app))
        self.about["text"] = args.kv_eviction_ui_text
        app.include_router(router(self.hub, Guard(args), self.about))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Give the page its engine, and say where it is."""
        if self.hub is None:
            return
        config = engine_client.vllm_config
        self.hub.engine = engine_client
        self.about |= {
            "model": str(config.model_config.served_model_name),
            "policy": args.kv_eviction,
            "engines": config.parallel_config.data_parallel_size,
            "statistics": not args.disable_log_stats,
            "pages": config.cache_config.num_gpu_blocks,
        }
        logger.info("EntropyKV: a live page is at %s of this server", PATH)
        if self.about["text"]:
            logger.warning("EntropyKV: that page shows the text of prompts and answers")


def _stopping(app: Any) -> bool:
    server = getattr(app.state, "server", None)
    return server is not None and bool(server.should_exit)
