# SPDX-License-Identifier: Apache-2.0
"""Who may read the page's data, and what a browser is told it may do with the page."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

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
        self._names = _own_names(args) if args.kv_eviction_ui_text and not keys else None

    def refusal(self, request: Request) -> tuple[int, str] | None:
        """The status and the sentence of a refusal; None if the request may be answered."""
        if not _same_site(request.headers):
            return 403, "this page's data are for the page itself, not for other sites"
        if self._names is not None and not _is_ours(request.headers.get("host"), self._names):
            return 403, (
                "this server shows text, and any site may call itself what your browser calls it: "
                "open the page by the server's address, name its origin in --allowed-origins, or "
                "start it with --api-key"
            )
        if self._keys is not None and not self._keys.verify_token(request.headers):
            return 401, "this server has an API key: send it as a bearer token"
        return None


def _same_site(headers: Mapping[str, str]) -> bool:
    """Not asked by another site's script: vLLM allows all of those unless told otherwise."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or origin.partition("://")[2] == headers.get("host")


def _own_names(args: Any) -> set[str]:
    """What the server may be called: so by its owner, or by its machine."""
    urls = [*args.allowed_origins, f"//{args.host or ''}", f"//{socket.gethostname()}"]
    return {"localhost", *(name for url in urls if (name := _host(url)))}


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _is_ours(host: str | None, names: set[str]) -> bool:
    """Whether a name cannot be another site's, which may have this server's address for a while.

    What comes without one does not come from a browser.
    """
    if host is None:
        return True
    name = _host(f"//{host}") or ""
    return name in names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _no_app(scope, receive, send) -> None:
    """The middleware is used for its check alone."""
