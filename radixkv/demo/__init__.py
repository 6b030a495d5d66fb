"""``radixkv demo``: a daemon, separate worker processes with a real model, one long document, different questions.

* ``options.py``: what is asked, and of which document.
* ``scenario.py``: what happens, step by step.
* ``processes.py``: starting, watching, killing and ending the daemon and the workers.
* ``worker.py``: one worker process (``python -m radixkv.demo.worker``).
* ``verdict.py``: whether everything was as it must be.
* ``report.py``: the table, the JSON object.
* ``progress.py``: the bars on stderr.

``run`` is all that the command line needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["run"]


def run(
    *, document: Path | None = None, questions: Sequence[str] = (), kv_dtype: str = "float32", as_json: bool = False
) -> int:
    """Run the demo. Gives the exit code: 0 when all went as it must, 1 when not, 2 when the input cannot be used.

    document: a text file (None: the handbook in examples/). questions: asked in this order, again from the first when
    there are fewer than nine. kv_dtype: what the pages hold, float32 or quantized. as_json: print one JSON object
    instead of the tables.
    """
    from radixkv.demo.options import load
    from radixkv.demo.scenario import run_demo

    return run_demo(lambda: load(document, questions, kv_dtype), as_json)
