"""docs/client.md: its example runs and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import radixkv
from radixkv.client.sync import Pool, Sequence
from tests.examples import EXAMPLES, printed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "client.md").read_text()
IN_ONE_GO, ASYNCIO = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize(("code", "page_size"), [(IN_ONE_GO, 4), (ASYNCIO, 16)], ids=["in one go", "asyncio"])
def test_the_example_prints_what_the_page_says(daemon_factory, code, page_size):
    daemon = daemon_factory(pools=[{"layers": 1, "kv_heads": 1, "head_dim": 8, "page_size": page_size, "pages": 32}])
    assert f"```\n{printed(daemon.endpoint, '-c', code)}```" in PAGE


def test_the_asyncio_example_is_the_shipped_file():
    assert (EXAMPLES / "aio_client.py").read_text() == ASYNCIO


def test_every_public_name_of_pool_and_sequence_is_on_the_page():
    for kind in (Pool, Sequence):
        for name in dir(kind):
            if not name.startswith("_") and name not in INTERNAL:
                assert re.search(rf"`[^`]*\b{name}\b", PAGE), f"{kind.__name__}.{name}"


INTERNAL = {
    "arriving", "broken", "child", "client", "closed", "committed_to", "compacted_to", "copies_made", "copy_wait_s",
    "core", "current", "deferred_error", "extended_by", "facts", "given_up", "go_on_as", "has_loaded", "hears", "id",
    "intact", "kept", "link", "loaded", "lock", "lose", "lost", "make", "name", "namespace", "not_loaded",
    "packed_tokens", "pool", "rows_copied", "rows_to_claim", "said_copied", "session", "sound", "suspended",
    "told", "truncated_to", "unsettled", "untold",
}  # fmt: skip
"""What the library's own parts use of them."""


def test_every_error_is_exported():
    for name in ("OutOfPages", "Timeout", "SessionLost", "Unavailable", "StaleHandle", "BadRequest", "Forked"):
        assert issubclass(getattr(radixkv, name), radixkv.RadixKVError)
