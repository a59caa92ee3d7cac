# SPDX-License-Identifier: Apache-2.0
"""Evaluation without a server: each text is read once, and every policy gets its keys and values.

The planning code and the kernels are those that serve. What differs from the engine: the tokens of
the text attended to the full cache while it was read, not to what a policy had left of it.
"""
