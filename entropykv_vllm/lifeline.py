# SPDX-License-Identifier: Apache-2.0
"""Children that end with whoever started them, even where that is killed and cannot tidy up."""

from __future__ import annotations

import ctypes
import os
import signal
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
