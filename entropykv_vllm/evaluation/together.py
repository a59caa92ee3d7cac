# SPDX-License-Identifier: Apache-2.0
"""Calls side by side, whose results come in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def together(call: Callable[[T], R], items: Sequence[T], most: int) -> Iterator[R]:
    """Yield `call(item)` of each item, in their order, at most `most` at a time.

    The first call that fails, in that order, raises what it raised. The threads are daemons and
    nobody waits for them: Ctrl-C ends at once, however long a call hangs.
    """
    todo: SimpleQueue[tuple[Future[R], T]] = SimpleQueue()
    made: list[Future[R]] = [Future() for _ in items]
    for pair in zip(made, items, strict=True):
        todo.put(pair)
    for _ in range(min(most, len(items))):
        Thread(target=_work, args=(call, todo), daemon=True).start()
    try:
        for future in made:
            yield future.result()
    finally:
        for future in made:
            future.cancel()


def _work(call: Callable[[Any], Any], todo: SimpleQueue[tuple[Future[Any], Any]]) -> None:
    while True:
        try:
            future, item = todo.get_nowait()
        except Empty:
            return
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call(item))
        except BaseException as error:
            future.set_exception(error)
