"""docs/performance.md against the modules that print the figures."""

import re
from functools import reduce
from itertools import product
from pathlib import Path

import pytest

from bench.__main__ import MODULES
from bench.copy import DIRECTIONS, PAGE_BYTES
from bench.events import PHASES
from bench.ipc import LENGTHS
from bench.peers.recipes import PEERS
from bench.scale import BYTES_BAR

FOLDER = Path(__file__).parents[2]
PAGE = (FOLDER / "docs" / "performance.md").read_text(encoding="utf-8")
NAME = re.compile(r'f?"((?:index|ipc|daemon|deaths|copy|events|replay)\.[\w{}]+)"')
FILLED = {
    "{tokens}": [str(tokens) for tokens in LENGTHS],
    "{part}": list(BYTES_BAR),
    "{edges}": ["1"],
    "{phase}": list(PHASES),
    "{name}": ["one", "all"],
    "{direction}": list(DIRECTIONS),
    "{size}": list(PAGE_BYTES),
}


def printed_names() -> list[str]:
    """The names of all rows, as the modules' source has them."""
    names = []
    for module in ("index", "scale", "ipc", "daemon", "deaths", "copy", "events", "replay"):
        for name in NAME.findall((FOLDER / "bench" / f"{module}.py").read_text(encoding="utf-8")):
            gaps = re.findall(r"{\w+}", name)
            for values in product(*(FILLED[gap] for gap in gaps)):
                names.append(reduce(lambda text, gap: text.replace(*gap), zip(gaps, values, strict=True), name))
    return names


@pytest.mark.parametrize("name", printed_names())
def test_every_row_is_explained(name: str) -> None:
    assert f"`{name}`" in PAGE


def test_there_are_as_many_rows_as_the_modules_print() -> None:
    assert len(printed_names()) == len(set(printed_names())) >= 19


def test_every_peer_and_module_is_there() -> None:
    for word in ("make bench", "make bench-peers", *(f"bench.{name}" for name in (*MODULES, "gpu"))):
        assert word in PAGE
    for peer in PEERS:
        assert peer.name.split()[0] in PAGE.lower()
