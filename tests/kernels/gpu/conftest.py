# SPDX-License-Identifier: Apache-2.0
"""Kernels are interpreted or compiled from the moment they are defined: never both in a process.

So the modules in `interpreted` are collected only where TRITON_INTERPRET is 1, in a process that
`test_interpreted` starts for each.
"""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["test_ahead.py", "test_interpreted.py"] if INTERPRETED else ["interpreted"]
