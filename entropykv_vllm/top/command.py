# SPDX-License-Identifier: Apache-2.0
"""`entropykv top`: a running server's requests, tokens and pages, looked at again and again."""

from __future__ import annotations

import argparse
import sys
import time

from entropykv_vllm.errors import UsageError
from entropykv_vllm.help_text import Help
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.top.look import base_url, look
from entropykv_vllm.top.report import report, text

#: To the upper left corner, and clear what follows; ANSI.
_HOME = "\x1b[H\x1b[J"


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = argparse.ArgumentParser(
        prog="entropykv top",
        description="Show what a running server does, from its /metrics: requests, tokens, the "
        "pool, and the pages of each tier. Figures per second and means of times are those since "
        "the last look. Ctrl-C ends it.",
        formatter_class=Help,
        allow_abbrev=False,
    )
    p.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="of the server")
    p.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between looks")
    p.add_argument(
        "--once",
        action="store_true",
        help="one table, of two looks; so it is with --json, and where no terminal shows it",
    )
    add_json(p)
    return p


def main(argv: list[str] | None = None) -> int:
    """Look once, or until Ctrl-C; return the exit status."""
    args = parser().parse_args(argv)
    if not 0 < args.interval < 3600:
        raise UsageError(f"--interval is {args.interval}: seconds above 0, and under an hour")
    url = base_url(args.url)
    if args.once or args.json is not None or not sys.stdout.isatty():
        before = look(url)
        time.sleep(args.interval)
        found = report(look(url), before, url)
        show(text(found), found, args.json)
    else:
        _watch(url, args.interval)
    return 0


def _watch(url: str, interval: float) -> None:
    before = None
    try:
        while True:
            now = look(url)
            print(f"{_HOME}{text(report(now, before, url))}", flush=True)
            before = now
            time.sleep(interval)
    except KeyboardInterrupt:
        print()
