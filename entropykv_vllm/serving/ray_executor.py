# SPDX-License-Identifier: Apache-2.0
"""vLLM's executors on Ray, which first ask the nodes of their workers what is installed there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from vllm import envs
from vllm.v1.executor import Executor
from vllm.v1.executor.ray_executor import RayDistributedExecutor
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2
from vllm.v1.executor.ray_utils import initialize_ray_cluster

from entropykv_vllm.serving.checks import UnsupportedError
from entropykv_vllm.version import __version__

#: Seconds between looks at whether the workers live.
_LOOK = 1.0

#: A node's address, the version there, and why there is none.
Found = tuple[str, str | None, str]


class NodesAsked:
    """Added to vLLM's executors on Ray."""

    #: The older of the two wants a worker on the machine of the server.
    worker_beside_server = False

    def _init_executor(self) -> None:
        # What vLLM compares the backend with, here and in the workers, is this name.
        self.parallel_config.distributed_executor_backend = "ray"
        initialize_ray_cluster(
            self.parallel_config, require_gpu_on_driver=self.worker_beside_server
        )
        check_nodes(ask(self.parallel_config.placement_group))
        super()._init_executor()


class EvictionRayExecutor(NodesAsked, RayExecutorV2):
    """vLLM's executor on Ray, which also sees that a worker on another node has died.

    vLLM's learns of it in a thread, while the engine waits for that worker's answer: for five
    minutes, and so do all clients.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        for queue in self.response_mqs:
            queue.dequeue = partial(self._answer, queue.dequeue)

    def _answer(self, dequeue: Callable, timeout: float | None = None, **more):
        """An answer, as soon as there is one.

        Raises:
            TimeoutError: after so many seconds, if any are given.
            RuntimeError: if a worker has died.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            try:
                return dequeue(timeout=max(0.0, min(left, _LOOK)), **more)
            except TimeoutError:
                if self.is_failed:
                    raise RuntimeError("a worker on the Ray cluster died") from None
                if left <= _LOOK:
                    raise


class EvictionRayDistributedExecutor(NodesAsked, RayDistributedExecutor):
    """The older one, which VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 chooses."""

    worker_beside_server = True


def ray_executor() -> type[Executor]:
    """The executor that takes the place of vLLM's choice."""
    newer = envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND
    return EvictionRayExecutor if newer else EvictionRayDistributedExecutor


def ask(group: PlacementGroup) -> list[Found]:
    """What each node of a placement group has installed; nodes may come twice."""
    task = ray.remote(_installed())
    places = [
        PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        for bundle in range(group.bundle_count)
    ]
    return ray.get([task.options(num_cpus=0, scheduling_strategy=p).remote() for p in places])


def check_nodes(found: list[Found]) -> None:
    """Refuse nodes that lack this package, or have another version of it.

    Raises:
        UnsupportedError: one sentence that names the nodes and says what to do.
    """
    bad = {
        f"{node} has {version or f'none ({reason})'}"
        for node, version, reason in found
        if version != __version__
    }
    if bad:
        raise UnsupportedError(
            f"every node of the Ray cluster needs EntropyKV {__version__}, but "
            f"{', '.join(sorted(bad))}: install entropykv-vllm {__version__} there, or turn "
            "eviction off with --kv-eviction none"
        )


def _installed() -> Callable[[], Found]:
    """What to ask a node, as a function inside a function.

    Ray sends such a function whole, others by name, which a node without this package could not
    find.
    """

    def installed() -> Found:
        import ray

        node = ray.util.get_node_ip_address()
        try:
            from entropykv_vllm.version import __version__ as there
        except Exception as error:
            return node, None, f"{type(error).__name__}: {error}"
        return node, there, ""

    return installed
