"""``radixkv demo``: its flags; what is shown is ``radixkv.demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from radixkv.cli import extras
from radixkv.cli.flags import JsonFlag


def demo(
    *,
    document: Annotated[Path | None, Parameter(help="a text file, instead of the one in examples/")] = None,
    question: Annotated[
        tuple[str, ...],
        Parameter(help="what to ask about it; may be repeated", metavar="TEXT", negative="", show_default=False),
    ] = (),
    kv_dtype: Annotated[
        str, Parameter(help="what pages hold: float32, or quantized fp8_e4m3, int8, int4", metavar="NAME")
    ] = "float32",
    as_json: JsonFlag = False,
) -> int:
    """Show it at work: several processes answer questions about one document.

    They share the document's KV cache. Starts a daemon of its own and worker processes, fetches the model if need be,
    kills a worker in the middle of an answer, then the daemon in the middle of another, and prints what was shared and
    saved. Exit code 1 unless all went as it should.
    """
    extras.require(extras.TRANSFORMERS, "transformers")
    from radixkv.demo import run

    return run(document=document, questions=question, kv_dtype=kv_dtype, as_json=as_json)
