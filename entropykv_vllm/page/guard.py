# SPDX-License-Identifier: Apache-2.0
"""Who may read the page's data, and what a browser is told it may do with the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

#: Scripts, styles and data from this server only; nobody may frame the page.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Asks for the server's API key, if it has one, and turns other sites' scripts away."""

    def __init__(self, args: Any) -> None:
        keys = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]
        self._keys = AuthenticationMiddleware(_no_app, keys) if keys else None

    def refusal(self, request: Request) -> tuple[int, str] | None:
        """The status and the sentence of a refusal; None if the request may be answered."""
        if not _same_site(request.headers):
            return 403, "this page's data are for the page itself, not for other sites"
        if self._keys is not None and not self._keys.verify_token(request.headers):
            return 401, "this server has an API key: send it as a bearer token"
        return None


def _same_site(headers: Mapping[str, str]) -> bool:
    """Not asked by another site's script: vLLM allows all of those unless told otherwise."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")


async def _no_app(scope, receive, send) -> None:
    """The middleware is used for its check alone."""
