"""The four ways, who runs what, what is measured.

For each way two engines, one after the other, are given the same load: the first has nothing from before; the second
is a fresh process, which is where a cache outside the engine shows. Each engine is a process of its own, and so is the
daemon, which is started for the way that needs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from radixkv.adapters.vllm.bench.load import Load
from radixkv.adapters.vllm.bench.process import EngineError, EngineProcess

KV_BYTES = 1 << 30
"""Of each engine, and of what is beside it."""
OWN_BYTES = 1 << 28
BLOCK = 32
WAYS = {
    "radixkv": "radixkv, vLLM's own prefix cache in front of it",
    "in_place": "radixkv, computing in its pages (zero copy)",
    "own": "vLLM's own prefix cache",
    "offloading": "vLLM's own prefix cache and its CPU offloading connector",
    "nothing": "no prefix cache",
}
CONNECTORS = {"radixkv": "RadixKVConnector", "in_place": "RadixKVZeroCopyConnector"}
ENGINES = ("first", "fresh")


@dataclass(frozen=True, slots=True)
class Measured:
    """One engine of one way. Seconds; tokens/s count prompts and outputs; cached tokens are what the engine reports.

    new_s: first token of a request whose document this engine has not seen, median. known_s: of the others.
    """

    way: str
    engine: str
    new_s: float
    known_s: float
    tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    outputs: list[list[int]]


@dataclass(slots=True)
class Findings:
    """not_run: what vLLM said to the ways that it refused."""

    rows: list[Measured] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def same_outputs(self) -> bool:
        """A cache that changes what a model says is worth nothing."""
        return all(row.outputs == self.rows[0].outputs for row in self.rows)

    @property
    def gave_nothing(self) -> list[str]:
        """Ways with radixkv whose fresh engine found no more than the first one: figures of anything else."""
        cached = {(row.way, row.engine): row.cached_tokens for row in self.rows}
        both = [way for way in CONNECTORS if all((way, engine) in cached for engine in ENGINES)]
        return [way for way in both if cached[way, "fresh"] <= cached[way, "first"]]

    def ok(self, asked: tuple[str, ...]) -> bool:
        """``asked``: ways that were named, which have to run. If none was: all but the offloading: it needs a GPU."""
        needed = asked or [way for way in WAYS if way != "offloading"]
        return self.same_outputs and not self.gave_nothing and not any(way in self.not_run for way in needed)


@dataclass(frozen=True, slots=True)
class Bench:
    """python: of the environment that has vLLM. model: a folder."""

    python: Path
    model: Path
    load: Load

    def run(self, ways: tuple[str, ...], told: Callable[[str], None]) -> Findings:
        """``told`` hears what is being done."""
        found = Findings()
        with tempfile.TemporaryDirectory(prefix="radixkv-bench-") as name:
            folder = Path(name)
            for way in ways:
                with self._beside(way, folder) as settings:
                    try:
                        for engine in ENGINES:
                            told(f"{way}: {engine} engine")
                            self._measure(way, engine, settings, folder, found)
                    except EngineError as error:
                        found.not_run[way] = str(error)
        return found

    @contextlib.contextmanager
    def _beside(self, way: str, folder: Path) -> Iterator[dict[str, Any]]:
        """What an engine is told to do it this way; meanwhile the daemon runs, if it is needed."""
        settings: dict[str, Any] = {"enable_prefix_caching": way != "nothing"}
        if way == "offloading":
            settings["kv_transfer_config"] = offloading()
        if way not in CONNECTORS:
            yield settings
            return
        with daemon(self.model, folder) as endpoint:
            config = {**transfer(endpoint), "kv_connector": CONNECTORS[way]}
            # Blocks of the engine's own lie beside the pages when it computes there.
            more = OWN_BYTES if way == "in_place" else 0
            yield {**settings, "kv_transfer_config": config, "kv_cache_memory_bytes": KV_BYTES + more}

    def _measure(self, way: str, engine: str, settings: dict[str, Any], folder: Path, found: Findings) -> None:
        given = {"model": str(self.model), "block_size": BLOCK, "kv_cache_memory_bytes": KV_BYTES, **settings}
        process = EngineProcess(self.python, given, folder / f"{way}-{engine}.log")
        try:
            found.versions = process.versions
            found.rows.append(measure(process, self.load, way, engine))
        finally:
            process.end()


def measure(process: EngineProcess, load: Load, way: str, engine: str) -> Measured:
    shape = load.shape
    process.generate([load.warm_up], shape.output_tokens)
    answers = [process.generate([prompt], shape.output_tokens) for prompt in load.one_by_one]
    together = process.generate(load.at_once, shape.output_tokens)
    first_tokens_s = [answer["first_tokens_s"][0] for answer in answers]
    results = [answer["results"][0] for answer in answers] + together["results"]
    prompt_tokens = sum(map(len, load.at_once))
    return Measured(
        way=way,
        engine=engine,
        new_s=median(first_tokens_s[: shape.documents]),
        known_s=median(first_tokens_s[shape.documents :]),
        tokens_per_s=(prompt_tokens + shape.output_tokens * len(load.at_once)) / together["seconds"],
        prompt_tokens=prompt_tokens + sum(map(len, load.one_by_one)),
        cached_tokens=sum(cached for _, cached, _ in results),
        outputs=[output for output, _, _ in results],
    )


def transfer(endpoint: str, **extra: Any) -> dict[str, Any]:
    """vLLM's KV transfer config for radixkv. ``extra``: settings of the connector."""
    return {
        "kv_connector": "RadixKVConnector",
        "kv_connector_module_path": "radixkv.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": endpoint, **extra},
    }


def offloading() -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": KV_BYTES, "block_size": BLOCK},
    }


@contextlib.contextmanager
def daemon(model: Path, folder: Path) -> Iterator[str]:
    """A daemon with one pool for the model's pages. The endpoint. Errors: EngineError when it does not start."""
    pool = f"name=default,model_config={model / 'config.json'},page_size={BLOCK},device_bytes={KV_BYTES}"
    command = [sys.executable, "-m", "radixkv", "serve", "--endpoint", f"ipc://{folder / 'r.sock'}", "--pool", pool]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RADIXKV_")}
    log = folder / "daemon.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise EngineError(f"the daemon does not start:\n{log.read_text()}")
            yield json.loads(line)["endpoint"]
        finally:
            process.terminate()
