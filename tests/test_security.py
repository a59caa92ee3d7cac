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


def calls(source: str):
    """What is called, by its whole name, and with which options."""
    tree = ast.parse(source)
    names = dict(name for node in ast.walk(tree) for name in imported(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            yield names.get(first, first) + dot + rest, options


def imported(node: ast.AST):
    """The names that an import gives, and what each stands for."""
    if isinstance(node, ast.Import):
        yield from ((one.asname, one.name) for one in node.names if one.asname)
    if isinstance(node, ast.ImportFrom):
        yield from ((one.asname or one.name, f"{node.module}.{one.name}") for one in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_that_is_read_is_run(path):
    for name, options in calls(path.read_text()):
        assert name not in FORBIDDEN, f"{path.name} calls {name}"
        assert options.get("shell") != "True", f"{path.name} asks a shell"
        assert options.get("trust_remote_code") != "True", f"{path.name} runs a model's code"


def test_the_walk_sees_calls():
    names = {name for path in MODULES for name, _ in calls(path.read_text())}
    assert {"yaml.safe_load", "json.loads", "subprocess.Popen"} <= names


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(x)",
        "from pickle import loads\nloads(x)",
        "from pickle import loads as read\nread(x)",
        "import pickle as p\np.loads(x)",
    ],
)
def test_a_call_is_seen_under_any_name(source):
    assert [name for name, _ in calls(source)] == ["pickle.loads"]


STATIC = sorted((PACKAGE / "page/static").glob("*.*"))


def test_the_live_page_lies_where_it_is_looked_at():
    assert {"page.html", "page.js"} <= {path.name for path in STATIC}


@pytest.mark.parametrize("path", STATIC, ids=lambda p: p.name)
def test_the_live_page_puts_text_in_as_text(path):
    text = path.read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in text
    outside = [url for url in re.findall(r"https?://[^\s\"')]+", text) if "w3.org" not in url]
    assert not outside, "the page works without the internet"
