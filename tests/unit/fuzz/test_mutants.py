"""The mutants: each patch fits the tree, the docs know each, and the runner says what happened."""

import ast
import json
import re

import pytest

from fuzz.mutants import report
from fuzz.mutants.__main__ import main
from fuzz.mutants.patching import PATCHES, ROOT, DoesNotApply, about, apply, is_empty, patches_in
from fuzz.mutants.pure import LAST, LEFT_OUT, SELECTION

OURS = patches_in(PATCHES)
CLOCK = "radixkv/sessions/running_time.py"
CLOCK_TESTS = "tests/unit/sessions/test_running_time.py"
LINE = "        self.seconds += min(now - self.now, self.step_s)\n"


def diff(path, new, old=LINE, before="a/", after="b/"):
    return f"--- {before}{path}\n+++ {after}{path}\n@@ -22,1 +22,1 @@\n-{old}+{new}"


@pytest.fixture
def tree(tmp_path):
    path = tmp_path / "tree" / CLOCK
    path.parent.mkdir(parents=True)
    path.write_text((ROOT / CLOCK).read_text())
    return tmp_path / "tree"


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("patch", OURS, ids=lambda patch: patch.stem)
def test_each_patch_still_changes_one_file_of_the_package_into_another_valid_one(patch, tmp_path):
    (path,) = re.findall(r"^\+\+\+ b/(radixkv/\S+\.py)", patch.read_text(), re.MULTILINE)
    mutated = tmp_path / path
    mutated.parent.mkdir(parents=True)
    mutated.write_text((ROOT / path).read_text())
    assert apply(patch, tmp_path) == 1
    assert ast.dump(ast.parse(mutated.read_text())) != ast.dump(ast.parse((ROOT / path).read_text()))
    assert about(patch).endswith(".")


def test_there_are_enough_and_each_is_another():
    assert len(OURS) >= 30
    changes = [re.sub(r"^@@.*", "", patch.read_text().partition("\n--- ")[2], flags=re.MULTILINE) for patch in OURS]
    assert len(set(changes)) == len(OURS)


def test_the_docs_say_of_each_which_test_caught_it():
    rows = report.written()
    assert [(name, bug) for name, bug, _ in rows] == [(patch.name, about(patch)) for patch in OURS], (
        "python -m fuzz.mutants --write"
    )
    for name, _, test in rows:
        path, _, function = test.partition("::")
        assert f"tests/{path}" in SELECTION, name
        function = function.rpartition("::")[2]
        assert f"def {function}(" in (ROOT / "tests" / path).read_text() or function == "runTest", name


def test_the_pure_part_is_made_of_tests_that_are_there():
    assert len(set(SELECTION)) == len(SELECTION)
    for path in SELECTION:
        assert (ROOT / path).is_file()
    for test in LAST + LEFT_OUT:
        path, _, function = test.partition("::")
        assert path in SELECTION
        assert f"def {function}(" in (ROOT / path).read_text()


def test_the_pure_part_starts_nothing_and_connects_to_nothing():
    forbidden = {"socket", "subprocess", "multiprocessing", "zmq", "torch", "asyncio"}
    for path in SELECTION:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & forbidden, path


@pytest.mark.parametrize(
    ("before", "after", "depth"),
    [("a/", "b/", 1), ("", "", 0), ("x/y/", "x/y/", 2), ("/home/me/radixkv/", "/home/me/radixkv/", 4)],
)
def test_paths_may_have_other_depths(tree, tmp_path, before, after, depth):
    patch = write(tmp_path, "one.patch", diff(CLOCK, LINE.replace("min", "max"), before=before, after=after))
    assert apply(patch, tree) == depth
    assert "max(now - self.now" in (tree / CLOCK).read_text()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (diff(CLOCK, "", old="        no such line\n"), "does not apply with -p1"),
        (diff("radixkv/nowhere.py", LINE), "no file of this tree is called a/radixkv/nowhere.py"),
        (diff("../../outside.py", LINE), "no file of this tree"),
        ("@@ -1,1 +1,1 @@\n-a\n+b\n", "names no file"),
        (diff(CLOCK, LINE)[:-40], "does not apply"),
    ],
)
def test_a_patch_that_does_not_fit_says_why(tree, tmp_path, text, why):
    before = (tree / CLOCK).read_text()
    with pytest.raises(DoesNotApply, match=re.escape(why)):
        apply(write(tmp_path, "bad.patch", text), tree)
    assert (tree / CLOCK).read_text() == before


def test_empty_is_what_changes_nothing(tmp_path):
    assert is_empty(write(tmp_path, "empty.patch", ""))
    assert is_empty(write(tmp_path, "words.patch", "Only words.\n"))
    assert not is_empty(write(tmp_path, "hunk.patch", "@@ -1,1 +1,1 @@\n-a\n+b\n"))
    assert not is_empty(write(tmp_path, "real.patch", diff(CLOCK, LINE)))


def test_the_runner_says_of_each_what_happened(tmp_path, capsys):
    write(tmp_path, "caught.patch", diff(CLOCK, LINE.replace("min", "max")))
    write(tmp_path, "empty.patch", "")
    write(tmp_path, "harmless.diff", diff(CLOCK, LINE.replace("\n", "  # the same\n")))
    arguments = [str(tmp_path), "--tests", CLOCK_TESTS, "--json"]
    assert main(arguments) == 1
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    said.sort(key=lambda one: one["patch"])
    assert [(one["patch"], one["outcome"]) for one in said] == [
        ("", "passed"), ("caught.patch", "caught"), ("empty.patch", "passed"), ("harmless.diff", "survived"),
    ]  # fmt: skip
    assert said[1]["by"].startswith(f"{CLOCK_TESTS}::test_")
    (tmp_path / "harmless.diff").unlink()
    assert main([str(tmp_path), *arguments[1:]]) == 0


def test_what_cannot_be_used_fails_the_run(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no *.patch" in capsys.readouterr().err
    write(tmp_path, "strange.patch", diff("src/other.py", LINE))
    assert main([str(tmp_path), "--tests", CLOCK_TESTS]) == 2
    assert "BAD strange" in capsys.readouterr().out
