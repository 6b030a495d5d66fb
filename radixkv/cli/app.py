"""The command line's entry: names the commands, turns errors into one line on stderr and an exit code.

A command's module is imported only when it runs: ``serve`` starts without what ``demo`` and ``stat`` need.

========  ==========================================================================
exit      meaning
========  ==========================================================================
0         done
1         an operating error (no daemon answers, a check of ``doctor`` fails, ...)
2         wrong flags or configuration
130       interrupted
3, 4, 70  of ``serve`` alone: endpoint in use, no memory, broken invariant
========  ==========================================================================
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from radixkv.errors import ConfigError, RadixKVError
from radixkv.version import VERSION

app = App(
    name="radixkv",
    help="A daemon that owns the KV-cache pages of this machine; workers share them by prefix.",
    version=VERSION,
    help_format="markdown",
    suppress_keyboard_interrupt=False,
)

COMMANDS = ("serve", "demo", "stat", "drain", "plan", "replay", "curve", "doctor", "bench", "model", "completion")
for place, command in enumerate(COMMANDS):
    app.command(f"radixkv.cli.{command}:{command}", name=command, sort_key=place)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. ``arguments``: those after the program's name, None: the process's own."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given or given[0] in ("--help", "-h"):
        for command in COMMANDS:
            _ = app[command]  # loads it, so that the overview can say what it does
    try:
        code = app(given, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except ConfigError as error:
        return _refuse(str(error))
    except CycloptsError as error:
        return _refuse(" ".join(str(error).split()))
    except RadixKVError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read stdout (head, less) has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code if isinstance(code, int) else 0


def _refuse(message: str) -> int:
    """Wrong flags or configuration. A daemon that was started again to try says it once."""
    from radixkv.ipc.refusals import is_known

    return 2 if is_known(message) else _fail(message, 2)


def _fail(message: str, code: int) -> int:
    print(f"radixkv: {message}", file=sys.stderr)
    return code
