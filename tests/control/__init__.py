# SPDX-License-Identifier: Apache-2.0
"""The control plane without a model: vLLM's scheduler, our page manager, and a worker of names.

What runs is the real thing, from a request's arrival to the rows that attention reads, but for the
numbers in the pages: a page holds a name of what its bytes must be (`contents`), and the worker
checks each one that is read. A run is a function of its `case`, and a case one of its seed.
"""
