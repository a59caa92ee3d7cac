# SPDX-License-Identifier: Apache-2.0
"""What `make sanitize` rests on, without its builds."""

import os
import sys

import pytest

from tests.sanitize import build, plugin


@pytest.fixture
def made(tmp_path):
    """Makes a file from another one, and says whether it was needed."""
    source, target = tmp_path / "source", tmp_path / "folder/target"
    source.write_text("")

    def make(*words, age=0):
        if target.exists():
            os.utime(source, (target.stat().st_mtime - age,) * 2)
            target.write_text("old")
        code = f"open({str(target)!r}, 'w').write('new')"
        build._make(target, [sys.executable, "-c", code, *words], [source])
        return target.read_text() == "new"

    return make


def test_only_what_is_older_than_its_sources_is_made(made):
    assert made()
    assert not made(age=60)
    assert made(age=-60)


def test_what_was_made_by_another_command_is_made_again(made):
    assert made()
    assert made("-O1", age=60)


def test_a_library_that_nobody_watches_is_not_tested(tmp_path):
    library = tmp_path / "_C.abi3.so"
    library.write_bytes(b"\x7fELF")
    with pytest.raises(ValueError, match="without AddressSanitizer"):
        plugin.load(str(library))


def test_instruction_sets_are_named():
    assert build.isas("avx2") == ["generic", "avx2"]
    assert build.isas("") == list(build.ISAS)
    assert "generic" in build.isas("best")
    with pytest.raises(SystemExit, match="there is no sse5"):
        build.isas("sse5")
