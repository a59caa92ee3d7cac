# SPDX-License-Identifier: Apache-2.0
"""Tasks whose answers show what of a long context can still be found."""

from entropykv_vllm.evaluation.tasks import (
    copying,
    lookup,
    multikey,
    multivalue,
    needle,
    passkey,
    tracking,
    word,
)
from entropykv_vllm.evaluation.tasks.case import Case, Task

__all__ = ["TASKS", "Case", "Task"]

_MODULES = (needle, multikey, multivalue, passkey, word, copying, lookup, tracking)

#: name -> task
TASKS: dict[str, Task] = {module.TASK.name: module.TASK for module in _MODULES}
