# SPDX-License-Identifier: Apache-2.0
"""Why a command stops, each in one sentence; `cli` tells it to the user."""


class UsageError(ValueError):
    """What the user asked for is wrong: exit status 2, as argparse has it."""


class RunError(RuntimeError):
    """What was asked for is right, and could not be done: exit status 1."""
