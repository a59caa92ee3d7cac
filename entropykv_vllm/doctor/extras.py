# SPDX-License-Identifier: Apache-2.0
"""What not every server needs: Ray, and the small model."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, entry_points, version

from entropykv_vllm.doctor.check import Check, ok
from entropykv_vllm.doctor.engine import Probed
from entropykv_vllm.model.fetch import NAME, FetchError, is_ready, model_folder

#: As the extra `ray` in pyproject.toml has it.
OLDEST_RAY = (2, 50)


def checks(probed: Probed) -> list[Check]:
    """Both; without Ray there is one machine, which most servers are content with."""
    return [ray(probed), model()]


def ray(probed: Probed) -> Check:
    """Could Ray place workers?"""
    try:
        number = version("ray")
    except PackageNotFoundError:
        return ok("Ray", "not installed; only servers on several machines need it")
    if _release(number) < OLDEST_RAY:
        newer = ".".join(map(str, OLDEST_RAY))
        return Check("Ray", "warn", number, f"Install ray[serve]>={newer}, or serve without Ray.")
    part = probed["worker"]
    if part.get("device") == "cpu" and part["platform"] != "RayCpuPlatform":
        others = [e.name for e in entry_points(group="vllm.platform_plugins")]
        found = f"{number}, but the platform is {part['platform']} (of {', '.join(others)})"
        return Check("Ray", "warn", found, "Remove other platform plugins, or serve without Ray.")
    return ok("Ray", f"{number}, platform {part.get('platform', 'not known')}")


def _release(number: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", number)[:2]))


def model() -> Check:
    """Does the small model lie in the cache, with the content that its manifest lists?"""
    try:
        folder = model_folder()
    except FetchError:
        advice = "Name a folder in ENTROPYKV_CACHE, if you have no model of your own."
        return Check("small model", "warn", "there is no home folder for it", advice)
    if is_ready(folder):
        return ok("small model", f"{NAME} as it was built")
    if folder.exists():
        advice = "Build it anew, if you serve it: entropykv model fetch."
        return Check("small model", "warn", f"{folder} is not as it was built", advice)
    advice = "Fetch it, if you have no model of your own: entropykv model fetch."
    return Check("small model", "warn", f"{NAME} is not in the cache", advice)
