# SPDX-License-Identifier: Apache-2.0
"""What the planner costs: `entropykv bench-overhead`."""
