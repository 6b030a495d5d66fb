"""The table in docs/testing.md: which test catches which mutant. Written by ``python -m fuzz.mutants --write``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fuzz.mutants.patching import PATCHES, ROOT
from fuzz.mutants.trial import Trial

PAGE = ROOT / "docs/testing.md"
BEGIN, END = "<!-- mutants: begin -->\n", "<!-- mutants: end -->\n"
_ROW = re.compile(r"^\| `([^`]+)` \| (.*) \| `([^`]+)` \|$", re.MULTILINE)


def write(trials: Iterable[Trial]) -> None:
    """Put these into the table; rows of patches that were not tried stay, those of patches that are gone go."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    rows = {name: (bug, test) for name, bug, test in written() if (PATCHES / name).exists()}
    rows |= {trial.patch: (trial.about, _short(trial.by)) for trial in trials if trial.outcome == "caught"}
    lines = "".join(f"| `{name}` | {bug} | `{test}` |\n" for name, (bug, test) in sorted(rows.items()))
    table = f"| mutant | the bug | caught by |\n| --- | --- | --- |\n{lines}"
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")


def written() -> list[tuple[str, str, str]]:
    """The table's rows: patch, bug, test."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return [(row[1], row[2], row[3]) for row in _ROW.finditer(table)]


def _short(test: str) -> str:
    return test.removeprefix("tests/").partition("[")[0]
