# SPDX-License-Identifier: Apache-2.0
"""What the page on security says that the package does not do."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "entropykv_vllm"
MODULES = sorted(PACKAGE.rglob("*.py"))
#: Run what they read, or could.
FORBIDDEN = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "pickle.load",
    "pickle.loads",
    "marshal.loads",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "torch.load",
    "joblib.load",
}


def calls(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_that_is_read_is_run(path):
    for name, options in calls(path):
        assert name not in FORBIDDEN, f"{path.name} calls {name}"
        assert options.get("shell") != "True", f"{path.name} asks a shell"
        assert options.get("trust_remote_code") != "True", f"{path.name} runs a model's code"


def test_the_walk_sees_calls():
    names = {name for path in MODULES for name, _ in calls(path)}
    assert {"yaml.safe_load", "json.loads", "subprocess.Popen"} <= names


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "page/static").glob("*.*")), ids=lambda p: p.name
)
def test_the_live_page_puts_text_in_as_text(path):
    text = path.read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in text
    outside = [url for url in re.findall(r"https?://[^\s\"')]+", text) if "w3.org" not in url]
    assert not outside, "the page works without the internet"
