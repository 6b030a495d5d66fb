"""``radixkv completion bash``: the shell's completion script, on stdout."""

from __future__ import annotations

from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print a shell's completion script.

    Use it as in: eval "$(radixkv completion bash)"
    """
    from radixkv.cli.app import app

    print(app.generate_completion(shell=shell))
