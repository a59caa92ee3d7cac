# SPDX-License-Identifier: Apache-2.0
"""Play cases from many seeds, or one again: `python -m tests.control --steps 1000000`."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter

from tests import conftest  # noqa: F401, sets how vLLM runs

# Before vLLM is imported: it has a line for each scheduler.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from .case import ACTIONS, Case, make_case
from .shrink import again, failure, shrunk
from .world import play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.control", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first case (any, and it is said which)")
    parser.add_argument("--steps", type=int, help="go on for so many steps, from seed to seed")
    parser.add_argument("--actions", type=int, default=ACTIONS, help="of a case (%(default)s)")
    args = parser.parse_args()
    seed = random.randrange(1 << 40) if args.seed is None else args.seed
    if args.steps is None:
        return _one(seed, args.actions)
    return _many(seed, args.actions, args.steps)


def _one(seed: int, actions: int) -> int:
    case = make_case(seed, actions)
    found = failure(case)
    if found is None:
        print(f"seed {seed}, {actions} actions: nothing is wrong")
        print(json.dumps(play(case), sort_keys=True))
        return 0
    _explain(seed, case, found)
    return 1


def _many(first: int, actions: int, steps: int) -> int:
    """Cases one after the other until there were enough steps, or one fails."""
    seen: Counter[str] = Counter()
    progress = Progress(steps)
    seed = first
    while seen["steps"] < steps:
        case = make_case(seed, actions)
        try:
            seen += play(case)
        except KeyboardInterrupt:
            break
        except Exception:
            found = failure(case)
            assert found is not None, f"seed {seed} failed, and then it did not"
            _explain(seed, case, found)
            return 1
        seed += 1
        progress.show(seen["steps"])
    print(f"\n{seen['steps']:,} steps, seeds {first} to {seed - 1}: nothing is wrong")
    print(json.dumps(seen, sort_keys=True))
    return 0


class Progress:
    """A bar in a terminal, and a line for each twentieth elsewhere."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began, self.shown = steps, time.monotonic(), 0

    def show(self, done: int) -> None:
        share = min(1, done / self.steps)
        left = (time.monotonic() - self.began) * (1 - share) / share
        line = f"{done:,} steps, {left / 60:.0f} minutes left"
        if sys.stderr.isatty():
            print(f"\r[{'#' * int(40 * share):40}] {line} ", end="", file=sys.stderr)
        elif int(20 * share) > self.shown:
            self.shown = int(20 * share)
            print(line, file=sys.stderr, flush=True)


def _explain(seed: int, case: Case, found: tuple[str, str]) -> None:
    """Say how a case fails, and the smallest one that fails so."""
    print(f"\nseed {seed}, {len(case.actions)} actions: {found[0]} in {found[1]}")
    print(f"again: {again(seed, len(case.actions))}")
    small = shrunk(case, found)
    print(f"the smallest found that fails so has {len(small.actions)} actions:")
    print(small.setup)
    for action in small.actions:
        print(f"  {action}")
    play(small)  # its traceback


if __name__ == "__main__":
    sys.exit(main())
