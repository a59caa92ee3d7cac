# SPDX-License-Identifier: Apache-2.0
"""What the attention backends need to read a table with holes (worker process)."""
