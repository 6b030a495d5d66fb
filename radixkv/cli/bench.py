"""``radixkv bench vllm``: its flags; what is measured is ``radixkv.adapters.vllm.bench``."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from radixkv.cli.flags import JsonFlag
from radixkv.cli.values import refuse

bench = App(name="bench", help="Measure radixkv behind a serving engine.", help_format="markdown")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """What is asked of each engine."""

    document_tokens: Annotated[int, Parameter(help="tokens of a document", metavar="TOKENS")] = 512
    documents: Annotated[int, Parameter(help="documents of each half of the load", metavar="COUNT")] = 2
    questions: Annotated[int, Parameter(help="questions about a document, 2 or more", metavar="COUNT")] = 4


@bench.command
def vllm(
    *,
    python: Annotated[Path, Parameter(help="of an environment with vLLM and radixkv", metavar="PATH")] = Path(
        ".venv-vllm/bin/python"
    ),
    model: Annotated[Path | None, Parameter(help="a model's folder; default: the demo's, fetched before")] = None,
    way: Annotated[
        tuple[str, ...],
        Parameter(
            help="radixkv, in_place, own, offloading or nothing; may be repeated", negative="", show_default=False
        ),
    ] = (),
    load: LoadFlags | None = None,
    as_json: JsonFlag = False,
) -> int:
    """Measure vLLM on prompts with shared prefixes: with radixkv, its own prefix cache, CPU offloading, and nothing.

    Each way gets two engines, one after the other and each in a process of its own: the second one is fresh, and gets
    from radixkv what the first one computed. Minutes. Prints a table: times to the first token, and throughput.
    """
    from radixkv.adapters.smollm2 import model_directory
    from radixkv.adapters.vllm.bench import report
    from radixkv.adapters.vllm.bench.load import Shape, make
    from radixkv.adapters.vllm.bench.run import WAYS, Bench

    load = load or LoadFlags()
    check(load, way, tuple(WAYS))
    shape = Shape(document_tokens=load.document_tokens, documents=load.documents, questions=load.questions)
    asked = Bench(existing("python", python), existing("model", model or model_directory()), make(shape))
    found = asked.run(way or tuple(WAYS), lambda what: print(what, file=sys.stderr))
    print(json.dumps(report.as_json(shape, found)) if as_json else report.table(shape, found))
    return 0 if found.ok(way) else 1


def check(load: LoadFlags, ways: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Errors: ConfigError."""
    for one in ways:
        if one not in known:
            raise refuse("way", one, ", ".join(known))
    limits = {"document_tokens": 1, "documents": 1, "questions": 2}
    for name, least in limits.items():
        if getattr(load, name) < least:
            raise refuse(name, getattr(load, name), f"a whole number from {least}")


def existing(what: str, path: Path) -> Path:
    """Errors: ConfigError."""
    if not path.exists():
        raise refuse(what, str(path), "one that exists; `make engines` and `radixkv model fetch smollm2` bring them")
    return path.absolute()
