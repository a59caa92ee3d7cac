# SPDX-License-Identifier: Apache-2.0
"""What is asked of the live page, and what it must answer."""

from __future__ import annotations

import random
from collections.abc import Mapping

PATH = "/entropykv"
FILES = ["", "/icon.svg", "/page.css", "/page.js", "/map.js", "/story.js"]
EVENTS = f"{PATH}/events"
#: The longest name of a request that may be asked for.
LONGEST = 512
OTHERS = [
    *("/", "/x", "/page.html", "/static/page.html", "/../health", "/%2e%2e/health", "/%00", "/%ff"),
    *(
        "/events/",
        "/events/x",
        "//events",
        "/page.js%00",
        "/page.js/../../guard.py",
        "/%C3%A9",
        "/..%5c",
    ),
    *("/" + "x" * 4000, "/Events", "/page.css;x", "/routes.py"),
]
QUERIES = [
    *("", "request=x", "request=", "request=%00", "request=%ff%fe", "request=%ed%a0%80", "request"),
    *(
        "request=a&request=b",
        "request[]=x",
        "other=1",
        "request=%F0%9F%9A%A2",
        "&&&=",
        "request=cmpl-",
    ),
    *(f"request={'n' * length}" for length in (LONGEST, LONGEST + 1, 4000)),
]
HEADERS: list[Mapping[str, str]] = [
    *[{}] * 5,
    {"Origin": "https://elsewhere.example"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Origin": "null"},
    {"Accept": "x"},
]

#: Method, target, headers; the statuses that are right, and words of a refusal.
Asked = tuple[str, str, Mapping[str, str], tuple[int, ...], tuple[str, ...]]


def request(rng: random.Random) -> Asked:
    """One request for the page, a part of it, its events, or something that it does not have."""
    query, headers = rng.choice(QUERIES), rng.choice(HEADERS)
    where = rng.random()
    if where < 0.15:
        path = PATH + rng.choice(FILES) if rng.random() < 0.5 else EVENTS
        return rng.choice(["POST", "PUT", "DELETE", "HEAD"]), f"{path}?{query}", headers, (405,), ()
    if where < 0.4:
        return "GET", f"{PATH}{rng.choice(FILES)}?{query}", headers, (200,), ()
    if where < 0.6:
        return "GET", f"{PATH}{rng.choice(OTHERS)}?{query}", headers, (404, 307), ()
    return "GET", f"{EVENTS}?{query}", headers, *_events(query, headers)


def _events(query: str, headers: Mapping[str, str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if "Origin" in headers or "Sec-Fetch-Site" in headers:
        return (403,), ("other sites",)
    if len(query) > LONGEST + len("request="):
        return (400,), ("so long a name",)
    return (200,), ()
