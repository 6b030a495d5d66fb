"""``radixkv model fetch smollm2``: bring the demo's model onto this machine."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from cyclopts import App, Parameter

from radixkv.cli import extras

model = App(name="model", help="Fetch the model of the demo.", help_format="markdown")


@model.command
def fetch(
    name: Annotated[Literal["smollm2"], Parameter(help="which model", metavar="NAME")],
    /,
) -> int:
    """Download a model, check it and convert it once; print the folder it is in.

    smollm2 is SmolLM2-135M-Instruct: 93 MB to download, 542 MB on disk, under $RADIXKV_CACHE or ~/.cache/radixkv.
    Without anything to do it needs no network.
    """
    extras.require(extras.TRANSFORMERS, "transformers")
    from radixkv.adapters import smollm2

    try:
        print(smollm2.fetch_shown())
    except smollm2.ModelError as error:
        print(f"radixkv: {name}: {error}", file=sys.stderr)
        return 1
    return 0
