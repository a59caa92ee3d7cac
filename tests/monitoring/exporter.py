# SPDX-License-Identifier: Apache-2.0
"""The `/metrics` of a server that has no engine: vLLM's own loggers and ours, fed made-up counts.

Run as a module it prints its port and serves until it is ended; each scrape is one more step.
"""

from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import prometheus_client
from vllm.config import VllmConfig
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import (
    FinishedRequestStats,
    IterationStats,
    PrefixCacheStats,
    SchedulerStats,
)

from entropykv_vllm.config.settings import CONFIG_KEY
from entropykv_vllm.pages.manager import TierCounts
from entropykv_vllm.serving.metrics import EvictionStatLogger, pack

COUNTS = TierCounts(hot=9, cold=4, freed=5, tokens_evicted=60, collapses=2, copies=1)


def loggers() -> tuple:
    """In the order in which vLLM makes them: plugins' first."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(
        served_model_name="small", max_model_len=8192, is_diffusion=False
    )
    config.additional_config = {CONFIG_KEY: {}}
    return EvictionStatLogger(config), PrometheusStatLogger(config, [0])


def step() -> tuple[SchedulerStats, IterationStats]:
    """What the engine would say of one step."""
    found = PrefixCacheStats(requests=1, queries=100, hits=40)
    scheduled = SchedulerStats(
        num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.5, prefix_cache_stats=found
    )
    pack(scheduled, [("all", COUNTS)])
    done = IterationStats()
    done.time_to_first_tokens_iter = [0.2]
    done.inter_token_latencies_iter = [0.02]
    done.finished_requests = [FinishedRequestStats(FinishReason.STOP, queued_time=1.5)]
    return scheduled, done


class Metrics(BaseHTTPRequestHandler):
    """Answers every GET with the registry, one step later."""

    def do_GET(self) -> None:
        stats = step()
        for logger in self.server.loggers:
            logger.record(*stats)
        body = prometheus_client.generate_latest()
        self.send_response(200)
        self.send_header("Content-Type", prometheus_client.CONTENT_TYPE_LATEST)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        """Nobody reads a log line for each scrape."""


def main() -> None:
    """Serve on a free port of this machine."""
    server = HTTPServer(("127.0.0.1", 0), Metrics)
    server.loggers = loggers()
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
