# SPDX-License-Identifier: Apache-2.0
"""One look at a server: its `/metrics`, read."""

from __future__ import annotations

import http.client
import time
import urllib.request
from dataclasses import dataclass, field

from entropykv_vllm.errors import RunError

PATIENCE = 10  # seconds for an answer


@dataclass
class Look:
    """What `/metrics` said.

    Attributes:
        at: when, in seconds of a clock that only goes forward.
        models: the names that the server gives its models.
        values: of each sample, by its name; those of engines and tiers are added up.
        tiers: the same of samples that have a tier, by tier, and by kind where there is one.
        engines: how many there are.
    """

    at: float
    models: set[str] = field(default_factory=set)
    values: dict[str, float] = field(default_factory=dict)
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    engines: set[str] = field(default_factory=set)

    def add(self, name: str, labels: dict[str, str], value: float) -> None:
        """Count a sample in."""
        self.models |= {labels["model_name"]} if "model_name" in labels else set()
        self.engines |= {labels["engine"]} if "engine" in labels else set()
        self.values[name] = self.values.get(name, 0.0) + value
        if "tier" in labels:
            tier = self.tiers.setdefault(labels["tier"], {})
            key = labels.get("kind", name)
            tier[key] = tier.get(key, 0.0) + value


def base_url(text: str) -> str:
    """The address of a server, however much of it was given."""
    url = text if "://" in text else f"http://{text}"
    return url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")


def look(url: str) -> Look:
    """Read the metrics of the server at `url`.

    Raises:
        RunError: one sentence that says why there are none.
    """
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE) as answer:
            text = answer.read().decode()
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise RunError(
            f"no server answers at {url}/metrics ({reason}): start one with vllm serve MODEL "
            "--kv-eviction entropykv, or name the address of yours"
        ) from None
    return read(text, url)


def read(text: str, url: str) -> Look:
    """A look at the text of `/metrics`.

    Raises:
        RunError: if it is not vLLM's.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError:
        raise RunError("prometheus_client is missing: pip install prometheus_client") from None
    found = Look(time.monotonic())
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("vllm:"):
                    found.add(sample.name, sample.labels, sample.value)
    except ValueError:
        found.values.clear()
    if "vllm:num_requests_running" not in found.values:
        raise RunError(f"{url}/metrics is not that of vLLM: name the address of vllm serve")
    return found
