# SPDX-License-Identifier: Apache-2.0
"""Deliberate bugs, put into a copy one at a time: is each caught by a test?"""
