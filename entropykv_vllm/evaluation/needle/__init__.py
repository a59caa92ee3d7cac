# SPDX-License-Identifier: Apache-2.0
"""`entropykv needle`: hidden numbers, asked for through the engine."""
