# SPDX-License-Identifier: Apache-2.0
"""The policies and quotas there are: a new one is a module and a line here."""

#: policy -> the module in `kernels/scores` that ranks tokens for it.
MODULES = {
    "entropykv": "entropykv",
    "norm": "norm",
    "knorm": "knorm",
    "keydiff": "keydiff",
    # Both keep no old tokens but the first ones; they differ in the sinks of the plan.
    "sink": "position",
    "window": "position",
    "random": "random",
    "h2o": "h2o",
    "snapkv": "snapkv",
    "tova": "tova",
}

#: Those that read attention, on CPUs only: their modules say how many QUERIES count.
READ_ATTENTION = ("h2o", "snapkv", "tova")

#: What quotas and windows may follow over the layers: modules in `plan`.
CURVES = ("lara", "pyramid")
