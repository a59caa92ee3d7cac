# SPDX-License-Identifier: Apache-2.0
"""Children that end with whoever started them, even where that is killed and cannot tidy up."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

#: Of Linux' prctl(2), which other systems lack.
_SET_PARENT_DEATH_SIGNAL = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def lifeline(number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Return a `preexec_fn`: the child gets signal `number` when the thread that started it ends.

    So that thread has to wait for the child. Children of the child are its own business.
    """
    parent = os.getpid()

    def hold() -> None:
        if _prctl is None:
            return
        _prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(number))
        if os.getppid() != parent:  # it ended before the kernel was told
            os._exit(128 + number)

    return hold


def end_with_parent(patience: float = 20) -> None:
    """Let this process, if `multiprocessing` started it, end when the one that did has ended.

    It gets SIGTERM then, and is killed `patience` seconds later if it is still there.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, daemon=True, name="lifeline").start()
