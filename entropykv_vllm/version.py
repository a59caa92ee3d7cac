# SPDX-License-Identifier: Apache-2.0
"""The one place that holds the version; the build reads it from here."""

__version__ = "0.1.0"
