# SPDX-License-Identifier: Apache-2.0
"""`entropykv eval`: what eviction and quantization cost, on your model and your text."""
