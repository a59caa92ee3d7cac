# SPDX-License-Identifier: Apache-2.0
"""What `make gpu-check` needs on a machine with a GPU: torch, triton and numpy, nothing else."""

import subprocess
import sys

MISSING = ("vllm", "pydantic", "yaml", "transformers", "tqdm", "matplotlib", "hypothesis")


def test_gpu_check_needs_neither_vllm_nor_what_comes_with_it():
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({MISSING}))\n"
        "from entropykv_vllm.evaluation.gpu_check import command\n"
        "command.parser().print_help()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "--device" in found.stdout


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    from entropykv_vllm.evaluation.gpu_check import command

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main(["--arch"]) == 2
    assert capsys.readouterr().err == "gpu_check: error: torch sees no CUDA device here\n"


def test_a_python_without_torch_is_named_in_one_sentence():
    code = (
        "import runpy, sys; sys.modules['torch'] = None\n"
        "runpy.run_module('entropykv_vllm.evaluation.gpu_check', run_name='__main__')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith(f"gpu_check: error: {sys.executable} has no torch: name")
    assert found.stderr.count("\n") == 1


def test_the_device_is_the_one_that_is_named(capsys, monkeypatch):
    from entropykv_vllm.evaluation.gpu_check import command

    current = [0]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_device", lambda index: current.__setitem__(0, index))
    found = {0: (9, 0), 1: (8, 6)}
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: found[current[0]])
    assert command.main(["--arch"]) == 0
    assert command.main(["--arch", "--device", "cuda:1"]) == 0
    assert capsys.readouterr().out == "90\n86\n"
