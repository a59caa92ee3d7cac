# SPDX-License-Identifier: Apache-2.0
"""`entropykv doctor`: is this machine ready to serve?"""
