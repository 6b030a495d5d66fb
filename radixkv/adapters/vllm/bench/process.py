"""A process with one vLLM engine (``child.py``), in the environment that has vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

from radixkv.errors import RadixKVError

ANSWER_S = 900.0
"""So long an engine may take to start, or for one answer, on a busy machine; then it is killed."""
LOG_CHARACTERS = 4000
CHILD = "radixkv.adapters.vllm.bench.child"
ALONE = {
    # In one process, so that a kill ends all of it; one thread, and not bound to a core that others use.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


class EngineError(RadixKVError):
    """The engine did not start, or has ended."""


class EngineProcess:
    """``python``: the interpreter of an environment with vLLM and radixkv. ``log``: where its stderr goes."""

    def __init__(self, python: Path, settings: dict[str, Any], log: Path) -> None:
        """``settings``: arguments of ``vllm.LLM``. Errors: EngineError, with what vLLM said."""
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [python, "-m", CHILD], env={**os.environ, **ALONE}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
            )  # fmt: skip
        self.send(settings)
        ready = self.receive()
        if "error" in ready:
            self.kill()
            raise EngineError(f"vLLM does not start: {ready['error']}")
        self.versions: dict[str, str] = ready["versions"]

    def generate(self, prompts: list[list[int]], max_tokens: int = 8, **job: Any) -> dict[str, Any]:
        self.send({"prompts": prompts, "max_tokens": max_tokens, **job})
        return self.receive()

    def send(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Errors: EngineError when it ended, or took longer than ANSWER_S."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(ANSWER_S, self.process.kill)
        watchdog.start()
        try:
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise EngineError(f"the engine ended:\n{self.log.read_text()[-LOG_CHARACTERS:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(ANSWER_S)
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
