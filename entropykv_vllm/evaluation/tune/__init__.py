# SPDX-License-Identifier: Apache-2.0
"""`entropykv tune`: the least memory that still answers right, on your model and your text."""
