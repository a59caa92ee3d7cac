# SPDX-License-Identifier: Apache-2.0
"""What clients see, and what is left, when a server or a part of it is killed or lacks something.

A server serves several tests: each takes the one that the test before has left.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from entropykv_vllm.evaluation.server import counters

from .gone import group_of, shared_by, still_there
from .mounts import mounting
from .servers import PATIENCE, Server, Servers, Stream, answers, servers_in

pytestmark = pytest.mark.engine

#: Seconds until clients must know that nothing more will come, and until no process is left.
SOON = 30
#: Gives answers some seconds to end after SIGTERM.
DRAINS = ("--shutdown-timeout", "8")
#: In the name of shared memory that vLLM itself leaves behind when a pipeline's worker is killed.
PIPELINES = "cpushm"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The servers of this file, on one port."""
    with servers_in(tmp_path_factory.mktemp("servers")) as servers:
        yield servers


@contextmanager
def in_mid_stream(server: Server) -> Iterator[Stream]:
    """Do something to a server while it answers: the client knows soon, and nothing is left."""
    stream, family = Stream(server.port).begin(), server.family()
    memory = shared_by(family)
    assert memory, "workers and engine core share memory"
    try:
        yield stream
        assert stream.ends(SOON), "the client still waits"
        assert still_there(family, SOON) == []
        assert group_of(server.child.pid) == []
        left = [path.name for path in memory if path.exists()]
        assert [name for name in left if PIPELINES not in name] == []
    finally:
        for path in memory:
            path.unlink(missing_ok=True)


def test_a_second_server_on_a_port_is_refused_and_the_first_answers_on(servers: Servers) -> None:
    first = servers.running()
    second = subprocess.run(
        servers.words(), env=servers.environ(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert second.returncode != 0
    assert "Address already in use" in second.stderr.strip().splitlines()[-1]
    assert answers(first.url)
    assert counters(first.url)["vllm:entropykv_tokens_evicted_total"] > 0


def test_nothing_outlives_a_server_that_is_killed_and_the_next_one_takes_its_port(
    servers: Servers,
) -> None:
    with in_mid_stream(server := servers.running()):
        server.child.kill()
        server.child.wait(SOON)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", servers.port))
    assert answers(servers.start().url)


def test_a_server_ends_with_its_engine_core(servers: Servers) -> None:
    with in_mid_stream(server := servers.running()) as stream:
        server.part("EngineCore").kill()
        assert server.child.wait(SOON) == 0, "docs/operating.md says so, for those who restart it"
    assert "error" in stream.pieces[-2], stream.pieces[-2:]
    assert "engine core exited unexpectedly" in server.said()


def test_a_server_ends_with_any_of_its_workers(servers: Servers) -> None:
    with in_mid_stream(server := servers.start("-pp", "2")) as stream:
        server.part("Worker_PP1").kill()
        assert server.child.wait(SOON) == 0
    assert "error" in stream.pieces[-2], stream.pieces[-2:]
    assert "died unexpectedly" in server.said()


def test_a_server_needs_neither_a_home_to_write_to_nor_room_for_temporary_files(
    servers: Servers, tmp_path: Path
) -> None:
    home, full = tmp_path / "home", tmp_path / "full"
    with mounting() as mounts:
        mounts.add(home, "ro")
        mounts.add(full, "size=4k")
        (mounts.seen(full) / "filler").write_bytes(bytes(4096))
        server = servers.start(*DRAINS, wrap=mounts.command, TMPDIR=str(full), **lies_in(home))
        assert answers(server.url)


def lies_in(home: Path) -> dict[str, str]:
    """What makes a server look for all that it keeps for a user in one place."""
    names = ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    return {"HOME": str(home), **{name: str(home / name.lower()) for name in names}}


def test_after_sigterm_answers_have_their_time_and_the_server_ends_with_its_last_client(
    servers: Servers,
) -> None:
    """vLLM does not tell a client whose answer took longer."""
    server = servers.running(*DRAINS)
    family, core = server.family(), server.part("EngineCore")
    endless, short = Stream(server.port).begin(), Stream(server.port, tokens=24).begin()
    server.child.terminate()
    assert short.ends(SOON)
    assert short.pieces[-1] == "[DONE]"
    assert '"finish_reason":"length"' in short.pieces[-2]
    assert still_there([core], SOON) == []
    assert server.child.poll() is None, "it did not wait for its client"
    endless.leave()
    assert server.child.wait(SOON) == 0
    assert still_there(family, SOON) == []
