# SPDX-License-Identifier: Apache-2.0
"""`entropykv top`: what a running server does now."""
