"""The fake drivers, built, and the numbers by which a test steers them: ``fake_cuda/control.h`` has their meanings."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from enum import IntEnum
from pathlib import Path

SOURCES = Path(__file__).parent / "fake_cuda"
_LIBRARIES = {"libcuda.so.1": "libcuda.c", "libnvidia-ml.so.1": "libnvidia_ml.c"}


class Word(IntEnum):
    HOLD = 0
    FAIL_IN = 1
    FAIL_CODE = 2
    COPIES = 3
    MEMORY_MIB = 4
    CONTEXTS = 5
    ALLOCATIONS = 6
    MAPPED = 7
    REGISTERED = 8
    HOLDERS = 16
    LINGER = 80
    WORDS = 96


class Control:
    """Shared with every process that has the environment variable FAKE_CUDA_CONTROL set to this file."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(4 * Word.WORDS))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 4 * Word.WORDS)
        self._words = memoryview(self._memory).cast("i")

    def __getitem__(self, word: int) -> int:
        return self._words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value

    def release(self) -> None:
        """Nothing is held back, nothing fails, nobody lingers."""
        for word in (Word.HOLD, Word.FAIL_IN, Word.FAIL_CODE, Word.MEMORY_MIB, *range(Word.LINGER, Word.WORDS)):
            self._words[word] = 0

    def holders(self) -> set[int]:
        """Process ids that have ever made a context."""
        return {pid for pid in self._words[Word.HOLDERS : Word.LINGER] if pid}


def compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


def build(folder: Path) -> None:
    """Both libraries, under the names by which they are looked for."""
    command = [compiler() or "cc", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread"]
    for name, source in _LIBRARIES.items():
        out = ["-o", str(folder / name), str(SOURCES / source), "-ldl"]
        subprocess.run([*command, f"-Wl,-soname,{name}", *out], check=True)


def environment(folder: Path) -> dict[str, str]:
    """For processes that shall find the fake drivers, built in ``folder``, and put pools on their devices."""
    build(folder)
    Control(folder / "control")
    path = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return os.environ | {
        "LD_LIBRARY_PATH": ":".join(path),
        "FAKE_CUDA_CONTROL": str(folder / "control"),
        "FAKE_CUDA_DEVICES": "4",
        "RADIXKV_TEST_DEVICE": "cuda",
    }


def main(command: list[str]) -> int:
    """Run a command so. ``pytest``: with the plugin that reads pages by their address."""
    if command[:1] == ["pytest"]:
        command = [sys.executable, "-m", "pytest", "-p", "tests.cuda.on_fake", *command[1:]]
    with tempfile.TemporaryDirectory(prefix="radixkv-") as folder:
        return subprocess.run(command, env=environment(Path(folder)), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
