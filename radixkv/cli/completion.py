"""``radixkv completion bash``: the shell's completion script, on stdout."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="whose script", metavar="SHELL")], /
) -> None:
    """Print a shell's completion script.

    Use it as in: eval "$(radixkv completion bash)"
    """
    from radixkv.cli.app import app

    print(app.generate_completion(shell=shell))
