# SPDX-License-Identifier: Apache-2.0
"""Two replicas of the embedded model on this machine's CPU, behind one OpenAI endpoint.

`make serve-ray` runs it. The same settings for a model of your own, in Python: see `app`.
"""

import contextlib
import os
import signal

import ray
from ray import serve

from entropykv_vllm.model import fetch_model
from entropykv_vllm.serving.ray_serve import build_openai_app

POLICY = os.environ.get("KV_EVICTION", "entropykv")
REPLICAS = int(os.environ.get("REPLICAS", "2"))
#: What replicas need in their own environment: Ray hands on nothing by itself.
ENVIRONMENT = {
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    "HF_HUB_OFFLINE": "1",
}


def app() -> serve.Application:
    """The application that Ray Serve runs."""
    model = {
        "model_loading_config": {
            "model_id": "smollm2",
            "model_source": str(fetch_model(quiet=True)),
        },
        "accelerator_config": {"kind": "cpu"},
        "runtime_env": {"env_vars": ENVIRONMENT},
        "deployment_config": {
            "num_replicas": REPLICAS,
            # Requests with the same prefix go to the replica that has its pages.
            "request_router_config": {
                "request_router_class": "ray.serve.llm.request_router.PrefixCacheAffinityRouter",
                "request_router_kwargs": {
                    # Unless it has so many more under way than another.
                    "imbalanced_threshold": 4,
                    # What the router remembers of prompts, for each replica.
                    "do_eviction": True,
                    "eviction_threshold_chars": 20_000_000,
                    "eviction_target_chars": 16_000_000,
                },
            },
        },
        "engine_kwargs": {
            "kv_eviction": POLICY,
            "kv_eviction_config": os.environ.get("KV_CONFIG") or None,
            "dtype": "float32",
            # vLLM's own kernels for CPUs read no other cache than the model's.
            "kv_cache_dtype": "auto" if POLICY == "none" else "bfloat16",
            "max_model_len": 8192,
            # Replicas that compile side by side on one machine are long in starting.
            "enforce_eager": True,
        },
    }
    return build_openai_app({"llm_configs": [model]})


if __name__ == "__main__":
    # As many as the replicas and their neighbours ask for; they share the cores that there are.
    # "local": a cluster of its own, even beside one that runs here, or ran and was not stopped.
    ray.init("local", num_cpus=4 * REPLICAS + 4, include_dashboard=False)
    host, port = os.environ.get("HOST", "127.0.0.1"), int(os.environ.get("PORT", "8000"))
    serve.start(http_options={"host": host, "port": port})
    serve.run(app(), name="smollm2")
    print(f"serving on http://{host}:{port}/v1", flush=True)
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    print(f"metrics of each replica: {address} (Ctrl-C ends it all)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()
