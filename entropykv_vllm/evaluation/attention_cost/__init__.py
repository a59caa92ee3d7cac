# SPDX-License-Identifier: Apache-2.0
"""`entropykv attention-cost`: what scores that read attention cost in memory and time."""
