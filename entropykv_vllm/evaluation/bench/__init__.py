# SPDX-License-Identifier: Apache-2.0
"""`entropykv bench`: the same load on the same memory, without eviction and with it."""
