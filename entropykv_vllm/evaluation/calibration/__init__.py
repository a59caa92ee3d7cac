# SPDX-License-Identifier: Apache-2.0
"""Settings chosen for a model: which layers keep more, and how little memory is enough."""
