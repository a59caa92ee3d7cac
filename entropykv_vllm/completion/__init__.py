# SPDX-License-Identifier: Apache-2.0
"""`entropykv completion`: what a shell needs to complete the command line."""
