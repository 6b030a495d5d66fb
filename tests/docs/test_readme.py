"""The README's example is the file that ships, and does what the README says it does."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from radixkv.config import KVSpec
from tests.examples import EXAMPLES, printed

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def test_the_example_is_the_shipped_file():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert code == (EXAMPLES / "quickstart.py").read_text()


def test_the_example_prints_what_the_readme_says(daemon_factory):
    daemon = daemon_factory(pools=[{**asdict(KVSpec()), "pages": 728}])  # the shape that `radixkv serve` alone has
    assert f"```\n{printed(daemon.endpoint, EXAMPLES / 'quickstart.py')}```" in README


def test_folders_and_pages_named_exist():
    for place in re.findall(r"^\| `([a-z_/.]+)`", README, flags=re.MULTILINE):
        assert (ROOT / place).exists(), place
    for page in re.findall(r"\]\(([\w/]+\.md)", README + ARCHITECTURE):
        assert (ROOT / page).exists(), page


def test_every_folder_of_the_package_has_its_line():
    for folder in (ROOT / "radixkv").iterdir():
        if (folder / "__init__.py").exists():
            assert f"`radixkv/{folder.name}`" in README, folder.name


def test_files_named_in_the_architecture_exist():
    for place in set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", ARCHITECTURE)):
        assert (ROOT / place).exists() or (ROOT / "radixkv" / place).exists(), place
