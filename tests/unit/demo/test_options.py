"""Which document and which questions the demo takes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.demo import run
from radixkv.demo.options import BadInput, load


def test_the_handbook_and_its_questions_are_the_default() -> None:
    task = load(None, ())
    assert task.document.startswith("# Handbook of the Harbour")
    assert len(set(task.questions)) == 9


def test_fewer_than_nine_questions_are_asked_again() -> None:
    assert load(None, ("a?", "b?")).questions == (*("a?", "b?") * 4, "a?")
    assert load(None, [str(number) for number in range(10)]).questions == tuple("012345678")


def test_another_document(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\n A text. \n")
    assert load(path, ("What?",)).document == "A text."
    with pytest.raises(BadInput, match="--question"):
        load(path, ())


def test_what_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("empty", "binary", "missing"):
        with pytest.raises(BadInput, match="--document"):
            load(tmp_path / name, ("What?",))
    assert run(document=tmp_path / "missing", questions=["What?"]) == 2
    assert "cannot read" in capsys.readouterr().err
