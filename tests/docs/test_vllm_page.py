"""docs/vllm.md against the connector, as far as it goes without vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

from radixkv.adapters import vllm
from radixkv.adapters.vllm.door import FROM_ENGINE, DoorSettings
from radixkv.adapters.vllm.engine import check_engine
from radixkv.config import KVSpec

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")


def test_every_setting_and_its_default_is_on_the_page() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, flags=re.MULTILINE))
    defaults = DoorSettings(None, "default", KVSpec())
    assert set(rows) == set(DoorSettings.__dataclass_fields__) - set(FROM_ENGINE)
    for name in ("deadline_s", "pause_first_s", "pause_max_s"):
        assert float(rows[name]) == getattr(defaults, name)


def test_the_transfer_config_is_one_that_the_connector_takes() -> None:
    (given,) = re.findall(r"--kv-transfer-config '(.*?)'", PAGE, flags=re.DOTALL)
    config = json.loads(given)
    assert config["kv_connector"] in vllm.__all__
    assert config["kv_connector_module_path"] == vllm.__name__
    check_engine(
        SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1, tensor_parallel_size=1),
            kv_transfer_config=SimpleNamespace(kv_load_failure_policy=config["kv_load_failure_policy"]),
        )
    )


def test_the_page_names_what_exists() -> None:
    for path in re.findall(r"`((?:tests|examples)/[\w./-]+)`", PAGE):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for line in re.findall(r"\bmake ((?:[a-z-]+ ?)+)", PAGE):
        assert set(line.split()) <= set(targets), line
