"""docs/cli.md: every command and exit code has its row; and what any page says to type is a command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixkv.cli.app import COMMANDS, app
from radixkv.errors import Exit

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
SHELL = re.compile(r"```(?:sh|bash|console)\n(.*?)```", re.DOTALL)
ENDS = {"|", "&", "&&", ";", "||", ">", "2>", "<"}


def command_lines() -> Iterator[tuple[str, str]]:
    """Page and line, of all that begin with ``radixkv``, lines that go on in one."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in SHELL.findall(path.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                if line.removeprefix("$ ").startswith("radixkv "):
                    yield path.name, line.removeprefix("$ ")


LINES = sorted(set(command_lines()))


def test_every_command_has_its_row_and_its_section() -> None:
    for command in COMMANDS:
        assert f"| [`{command}`](#radixkv-{command}) |" in PAGE
        assert f"\n## `radixkv {command}`\n" in PAGE


def test_every_exit_code_has_its_row() -> None:
    rows = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, flags=re.MULTILINE)}
    assert rows == {*Exit, 130}


@pytest.mark.parametrize(("page", "line"), LINES)
def test_what_a_page_says_to_type_is_a_command_line(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    end = next((at for at, word in enumerate(words) if word in ENDS), len(words))
    app.parse_args(words[:end], exit_on_error=False, print_error=False)


def test_there_are_some_of_each_command() -> None:
    """Else the search for them would be of no use."""
    typed = {line.split()[1] for _, line in LINES}
    assert typed >= {*COMMANDS} - {"completion"}
