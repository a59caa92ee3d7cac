# SPDX-License-Identifier: Apache-2.0
"""What is left of a model whose fetch was killed, or whose disk was full or may only be read."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from entropykv_vllm.model import fetch
from entropykv_vllm.model.sources import SMOLLM2

from ..fetch_world import World
from .gone import still_there
from .mounts import mounting

#: Seconds until a child of what was killed must be gone.
SOON = 10
#: What changes files, or starts a process: as Python's audit events name it.
STEPS = ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.chmod", "subprocess.Popen")
MB = 1 << 20


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Stand-ins for everything heavy."""
    return World(tmp_path, monkeypatch)


# -- killed ------------------------------------------------------------------------------------


def killed_before_step(number: int) -> bool:
    """Fetch in a process that is killed before a step of its own; whether it got that far."""
    pid = os.fork()
    if pid == 0:
        steps = iter(range(number))

        def kill(event: str, details: tuple) -> None:
            reads = event == "open" and not (
                isinstance(details[1], str) and set(details[1]) & {*"aw+"}
            )
            if event in STEPS and not reads and next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        with contextlib.suppress(BaseException):
            fetch.fetch_model(quiet=True)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("before", ["nothing", "a damaged model"])
def test_killed_before_any_of_its_steps_a_fetch_leaves_a_whole_model_or_none(
    world: World, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next one makes it whole, and leaves nothing else."""
    world.install(monkeypatch)
    seen = set()
    for number in range(1000):
        if before == "a damaged model":
            fetch.fetch_model(quiet=True)
            (world.folder / "config.json").unlink()
        if not killed_before_step(number):
            break
        seen.add(whole := fetch.is_ready(world.folder, every_byte=True))
        assert whole == fetch.is_ready(world.folder)
        fetch.fetch_model(quiet=True)
        assert fetch.is_ready(world.folder, every_byte=True)
        assert world.leftovers() == []
        if before == "nothing":
            shutil.rmtree(world.cache)
    assert number > 10
    assert seen == {False, True}, "the last steps come when the model is in place"


def children_of(command: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that a command started, once there are any that stay."""
    end = time.monotonic() + SOON
    while not (found := psutil.Process(command.pid).children(recursive=True)):
        assert time.monotonic() < end, "it starts no process"
        time.sleep(0.05)
    return found


def test_the_converter_ends_with_a_fetch_that_is_killed_and_the_next_one_makes_the_model(
    world: World,
) -> None:
    world.write_converter("time.sleep(60)")
    command = world.start("--quiet")
    converter = psutil.Process(world.wait_for_conversion())
    command.kill()
    command.communicate(timeout=SOON)
    assert still_there([converter], SOON) == []
    assert not world.folder.exists()
    assert len(world.leftovers()) == 1
    world.write_converter()
    fetch.fetch_model(quiet=True)
    assert fetch.is_ready(world.folder, every_byte=True)
    assert world.leftovers() == []


def test_a_fetch_that_waits_for_another_goes_on_when_that_is_killed(world: World) -> None:
    world.write_converter("time.sleep(60)")
    first = world.start("--quiet")
    world.wait_for_conversion()
    world.write_converter()
    second = world.start()
    assert second.stderr is not None
    assert "waiting for another process" in second.stderr.readline()
    first.kill()
    first.communicate(timeout=SOON)
    out, err = second.communicate(timeout=60)
    assert out == f"{world.folder}\n", err
    assert fetch.is_ready(world.folder, every_byte=True)
    assert world.leftovers() == []


class Slow(BaseHTTPRequestHandler):
    """An index with one wheel, of which half comes and then nothing."""

    wheel: bytes
    name: str
    sent: threading.Event
    over: threading.Event

    def do_GET(self) -> None:
        asked_for_wheel = self.path.endswith(self.name)
        page = f'<a href="/{self.name}">{self.name}</a>'.encode()
        body = self.wheel if asked_for_wheel else page
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/zip" if asked_for_wheel else "text/html")
        self.end_headers()
        if asked_for_wheel:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.sent.set()
            self.over.wait(60)
        else:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def slow_index(wheel: Path) -> Iterator[tuple[str, threading.Event]]:
    """Serve a wheel slowly; give the index's address, and when half of the wheel was sent."""
    sent, over = threading.Event(), threading.Event()
    told = {"wheel": wheel.read_bytes(), "name": wheel.name, "sent": sent, "over": over}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Slow,), told))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple", sent
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def test_the_download_ends_with_a_fetch_that_is_killed_and_its_half_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, content=os.urandom(MB))
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    with slow_index(world.wheel) as (address, sent), monkeypatch.context() as patch:
        for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
            patch.delenv(name)
        patch.setenv("PIP_INDEX_URL", address)
        patch.setenv("TMPDIR", str(elsewhere))
        command = world.start("--quiet")
        assert sent.wait(60), "pip asked for no wheel"
        pip = children_of(command)
        command.kill()
        command.communicate(timeout=SOON)
        assert still_there(pip, SOON) == []
    assert list(elsewhere.iterdir()) == []
    assert len(world.leftovers()) == 1
    fetch.fetch_model(quiet=True)
    assert fetch.is_ready(world.folder, every_byte=True)
    assert world.leftovers() == []


# -- a full disk -------------------------------------------------------------------------------

# Writes three files as the real converter does: weights, tokenizer, settings. What it says of an
# error is the real one's.
LIKE_THE_REAL_ONE = """
import numpy
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from entropykv_vllm.model import convert
def write(gguf, out):
    save_file({"w": numpy.zeros(3 << 20, "uint8")}, out / "model.safetensors")
    words = {f"word {i:0200}": i for i in range(5000)}
    Tokenizer(models.WordLevel(words, "word 0")).save(str(out / "tokenizer.json"))
    (out / "vocabulary.txt").write_text("x" * (1 << 20))
convert.convert = write
if status := convert.main():
    sys.exit(status)
"""


def run(words: list[str], **environment: str) -> tuple[int, str, str]:
    """Run a command: its exit status, what it printed, and what it said."""
    env = {**os.environ, **environment}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env)
    return done.returncode, done.stdout, done.stderr


def is_one_sentence(said: str) -> bool:
    """Whether a command said one line and no more, and what it is."""
    return said.startswith("entropykv model fetch: error: ") and said.count("\n") == 1


def test_wherever_a_disk_fills_up_the_model_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, content=os.urandom(MB), needed_bytes=0)
    world.write_converter(LIKE_THE_REAL_ONE)
    conversions = []
    with mounting() as mounts:
        fetch_model = mounts.command(world.command("--quiet"))
        for kilobytes in (4, 600, 1500, 2600, 4500, 5600):
            mounts.add(world.cache, f"size={kilobytes}k")
            status, out, said = run(fetch_model)
            folder = mounts.seen(world.folder)
            assert (status, out) == (1, ""), f"{kilobytes} kB: {said}"
            assert is_one_sentence(said)
            assert "the disk is full: the model needs" in said
            assert not folder.exists()
            left = {path.name for path in mounts.seen(world.cache).iterdir()}
            assert left <= {f".{fetch.NAME}.lock"}
            conversions.append(len(world.conversions()))
        assert conversions == [0, 0, 0, 1, 2, 3], (
            "it filled up in each step: download, unpack, convert"
        )
        mounts.change(world.cache, "size=16m")
        assert run(fetch_model) == (0, f"{world.folder}\n", "")
        assert fetch.is_ready(folder, every_byte=True)


def cli(*words: str) -> list[str]:
    """The command line of `entropykv model fetch`, of the real model."""
    return [sys.executable, "-m", "entropykv_vllm", "model", "fetch", "--quiet", *words]


def test_a_disk_that_is_too_small_is_told_at_once(tmp_path: Path) -> None:
    with mounting() as mounts:
        mounts.add(tmp_path / "small", "size=4m")
        status, out, said = run(mounts.command(cli("--dir", str(tmp_path / "small"))))
        left = [path.name for path in mounts.seen(tmp_path / "small").iterdir()]
    assert (status, out) == (1, "")
    assert is_one_sentence(said)
    assert f"not enough room in {tmp_path / 'small'}" in said
    assert f"needs {SMOLLM2.needed_bytes / 1e6:.0f} MB" in said
    assert left == [f".{fetch.NAME}.lock"]


# -- read-only, or no home at all --------------------------------------------------------------


def test_a_home_that_may_only_be_read_is_told_with_what_to_set(world: World) -> None:
    """And setting it helps: pip has no home for its cache either."""
    home = world.cache.parent / "home"
    with mounting() as mounts:
        mounts.add(home, "ro")
        status, out, said = run(
            mounts.command(cli()), HOME=str(home), ENTROPYKV_CACHE="", XDG_CACHE_HOME=""
        )
        assert (status, out) == (1, "")
        assert is_one_sentence(said)
        cache = home / ".cache" / "entropykv"
        assert f"cannot write to the cache folder {cache} (Read-only file system)" in said
        assert said.endswith("name another one in ENTROPYKV_CACHE\n")
        done = run(mounts.command(world.command("--quiet")), HOME=str(home))
    assert done == (0, f"{world.folder}\n", "")


def test_a_model_in_a_cache_that_may_only_be_read_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, needed_bytes=0)
    with mounting() as mounts:
        mounts.add(world.cache, "size=4m")
        fetch_model = mounts.command(world.command("--quiet"))
        assert run(fetch_model)[0] == 0
        mounts.change(world.cache, "ro")
        assert run(fetch_model) == (0, f"{world.folder}\n", "")
        mounts.change(world.cache, "rw")
        (mounts.seen(world.folder) / "config.json").unlink()
        mounts.change(world.cache, "ro")
        status, out, said = run(fetch_model)
    assert (status, out) == (1, "")
    assert is_one_sentence(said)
    assert "cannot write to the cache folder" in said


def test_a_home_that_there_is_not_is_told_with_what_to_set() -> None:
    status, out, said = run(cli(), ENTROPYKV_CACHE="~there-is-no-such-user/models")
    assert (status, out) == (1, "")
    assert is_one_sentence(said)
    assert said.endswith("name a folder in ENTROPYKV_CACHE\n")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    for name in ("HOME", "ENTROPYKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)  # as in a container with a user's number alone
    with pytest.raises(fetch.FetchError, match="name a folder in ENTROPYKV_CACHE"):
        fetch.default_cache()
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert fetch.default_cache() == Path("/xdg/entropykv")
