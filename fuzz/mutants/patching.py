"""Patch files: what they touch, and how they get into a copy of the working tree."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATCHES = Path(__file__).parent / "patches"

PARTS = ("radixkv", "fuzz", "tests", "bench", "examples", "docs", "pyproject.toml")
"""What a copy has: enough for the tests, and for a patch to be found where it belongs."""

_FILE = re.compile(r"^(?:---|\+\+\+) ([^\t\n]+)", re.MULTILINE)
_HUNK = re.compile(r"^@@ ", re.MULTILINE)
_DEPTHS = (1, 0, 2, 3, 4, 5, 6)
"""How many leading folders of a patch's paths may be too many; the usual one first."""


class DoesNotApply(Exception):
    """A patch that is none, names no file of the tree, or does not fit what is there."""


def patches_in(folder: Path) -> list[Path]:
    """All patch files of a folder (or the one that is named), by name. Errors: DoesNotApply when there are none."""
    found = [folder] if folder.is_file() else sorted(folder.glob("*.patch")) + sorted(folder.glob("*.diff"))
    if not found:
        raise DoesNotApply(f"no *.patch or *.diff in {folder}")
    return found


def about(patch: Path) -> str:
    """The first line before the diff: what the bug is."""
    first = patch.read_text(encoding="utf-8", errors="replace").split("\n", 1)[0].strip()
    return "" if first.startswith(("---", "diff ", "+++", "@@", "Index:", "From ")) else first


def is_empty(patch: Path) -> bool:
    """True: it says itself that it changes nothing."""
    text = patch.read_text(encoding="utf-8", errors="replace")
    return not _HUNK.search(text) and not _FILE.search(text) and "GIT binary" not in text


def copy_tree(target: Path) -> None:
    """A copy of the working tree."""
    ignore = shutil.ignore_patterns(".*", "__pycache__", "results")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=ignore)
        elif source.exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / part)


def apply(patch: Path, tree: Path) -> int:
    """Change ``tree``; returns the depth (``patch -pN``) at which it fits. Errors: DoesNotApply."""
    depth = _depth(patch, tree)
    command = ["patch", f"-p{depth}", "--batch", "--forward", "--fuzz=2", "--no-backup-if-mismatch", "--reject-file=-"]
    command.append(f"--input={patch.resolve()}")
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("patching file")]
        raise DoesNotApply(f"does not apply with -p{depth}: {' '.join(said)[:300]}")
    return depth


def _depth(patch: Path, tree: Path) -> int:
    """By the files it names, which have to be there (one that it makes has no old side)."""
    names = _FILE.findall(patch.read_text(encoding="utf-8", errors="replace"))
    olds, news = names[::2], names[1::2]
    wanted = {new if old == "/dev/null" else old: old == "/dev/null" for old, new in zip(olds, news, strict=False)}
    if not wanted:
        raise DoesNotApply("not a unified diff: it names no file")
    for depth in _DEPTHS:
        if all(_is_there(tree, name, depth, made) for name, made in wanted.items()):
            return depth
    raise DoesNotApply(f"no file of this tree is called {', '.join(wanted)}, with or without leading folders")


def _is_there(tree: Path, name: str, depth: int, made: bool) -> bool:
    parts = Path(name.strip()).parts[depth:]
    if not parts or ".." in parts:
        return False
    path = tree.joinpath(*parts)
    return path.parent.is_dir() if made else path.is_file()
