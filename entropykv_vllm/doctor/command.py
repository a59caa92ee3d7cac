# SPDX-License-Identifier: Apache-2.0
"""`entropykv doctor`: is this machine ready to serve?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from entropykv_vllm.doctor import engine, extras, machine
from entropykv_vllm.doctor.check import Check
from entropykv_vllm.help_text import Help
from entropykv_vllm.json_file import add_json, show
from entropykv_vllm.plan.tier_table import columns


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    p = argparse.ArgumentParser(
        prog="entropykv doctor",
        description="Look whether this machine is ready to serve: vLLM, the plugin in a process "
        "like a worker's, kernels, memory, threads, Ray, the small model. Run it with the "
        "environment that the server will have. Nothing is changed, and no model is loaded.",
        formatter_class=Help,
        allow_abbrev=False,
        epilog="The exit status is 1 if something fails, so that no server would run.",
    )
    add_json(p)
    return p


def look() -> list[Check]:
    """Run all checks: some seconds, nearly all of them to import vLLM."""
    probed = engine.probe()
    return [*engine.checks(probed), *machine.checks(probed), *extras.checks(probed)]


def text(found: Sequence[Check]) -> str:
    """A table, and below it what to do."""
    rows = [["check", "", "found"], *([c.name, c.state, c.found] for c in found)]
    advice = [f"{c.name}: {c.advice}" for c in found if c.advice]
    return "\n\n".join([columns(rows, left=3), *(["\n".join(advice)] if advice else [])])


def report(found: Sequence[Check]) -> dict[str, Any]:
    """The same as JSON has it."""
    return {"ready": ready(found), "checks": [vars(check) for check in found]}


def ready(found: Sequence[Check]) -> bool:
    """Whether nothing failed."""
    return all(check.state != "fail" for check in found)


def main(argv: list[str] | None = None) -> int:
    """Print what was found; return the exit status."""
    args = parser().parse_args(argv)
    found = look()
    show(text(found), report(found), args.json)
    return 0 if ready(found) else 1
