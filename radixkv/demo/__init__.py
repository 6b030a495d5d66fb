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

from radixkv.demo.options import Options

__all__ = ["Options", "run"]


def run(options: Options) -> int:
    """Run the demo. Gives the exit code: 0 when all went as it must, 1 when not, 2 when the input cannot be used."""
    from radixkv.demo.scenario import run_demo

    return run_demo(options)
