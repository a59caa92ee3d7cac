# SPDX-License-Identifier: Apache-2.0
"""The kernels in builds that see wrong reads and writes, and races: `make sanitize`."""
