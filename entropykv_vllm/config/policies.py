# SPDX-License-Identifier: Apache-2.0
"""The policies there are: a new score is a module in `kernels/scores` and a line here."""

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
