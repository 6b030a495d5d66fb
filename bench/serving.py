"""A real daemon in a process of its own, at a private endpoint, for as long as a ``with`` block."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

SMALL_POOL = "name=default,layers=1,kv_heads=1,head_dim=8,dtype=float16,page_size=16,pages=32768"
"""16 MiB: pages of 512 bytes, so that the arena does not matter where it is not what is measured; more pages than any
module fills, so that nothing is evicted."""


@dataclass(frozen=True)
class Serving:
    """``start_s``: from exec to the ready line."""

    endpoint: str
    pid: int
    start_s: float
    stdout: IO[str]

    def next(self) -> Serving:
        """With ``--supervised``: the daemon that came after this one's death, when it is ready."""
        return replace(self, pid=json.loads(self.stdout.readline())["pid"])


@contextmanager
def serving(flags: Sequence[str] = ()) -> Iterator[Serving]:
    """``radixkv serve`` with these flags. It is asked to drain at the end. Errors: RuntimeError with its log, if it
    does not get ready or does not end well."""
    with tempfile.TemporaryDirectory(prefix="radixkv-bench-") as folder, Path(folder, "log").open("w+") as log:
        endpoint = f"ipc://{Path(folder, 'radixkv.sock')}"
        command = [sys.executable, "-m", "radixkv", "serve", "--endpoint", endpoint, *flags]
        begin = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                start_s = time.monotonic() - begin
                if line:
                    ready = json.loads(line)
                    yield Serving(ready["endpoint"], ready["pid"], start_s, process.stdout)
            finally:
                process.terminate()
        if process.returncode or not line:
            log.seek(0)
            raise RuntimeError(f"the daemon ended with {process.returncode}:\n{log.read()}")
