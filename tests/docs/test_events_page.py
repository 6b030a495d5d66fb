"""docs/events.md against the code: its configuration, what ``stat`` shows, what it says of numbers."""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import closing
from pathlib import Path

from radixkv.config import EventsConfig, PoolConfig
from radixkv.ipc import event_feed, events
from radixkv.ipc.event_ledger import Sizes

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text(encoding="utf-8")
WORDS = " ".join(PAGE.split())


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_configuration_is_one() -> None:
    config = EventsConfig(**tomllib.loads(block("toml"))["events"])
    asked = [json.loads(body) for body in re.findall(r"-d '(.*?)'", block("bash"), re.DOTALL)]
    assert (asked[0]["endpoint"], asked[0]["replay_endpoint"]) == (config.endpoint, config.replay_endpoint)
    assert asked[0]["model_name"] == asked[1]["model_name"]


def test_all_that_stat_shows_is_explained(tmp_path: Path) -> None:
    with closing(events.Events(EventsConfig(endpoint=f"ipc://{tmp_path}/pub"), PoolConfig(pages=8), None)) as told:
        table = PAGE.partition("## What `stat` shows")[2].partition("##")[0]
        assert set(told.statistics()) <= set(re.findall(r"`(\w+)`", table))


def test_its_numbers_are_the_codes() -> None:
    assert f"times 2^{event_feed.BOOT_SHIFT}" in WORDS and f"`sequence >> {event_feed.BOOT_SHIFT}`" in WORDS
    assert f"up to about {Sizes().tokens:,} tokens" in WORDS
    assert (
        f"to {Sizes().hashes:,} and the pool up to {Sizes().swept:,} pages" in WORDS
        and f"and {Sizes().swept:,} more" in WORDS
    )
    assert f"looks at {event_feed.TURN_LOOKS:,} places" in WORDS
    assert f"{event_feed.BUFFER_BYTES >> 20} MiB at most" in WORDS
    assert f"more than {event_feed.BACKLOG_BYTES >> 20} MiB wait" in WORDS
    assert f"At most {events.REPLAYS} replays" in WORDS and f"there were {events.REPLAYS} already" in WORDS
    assert f"takes nothing for {events.REPLAY_PATIENCE_S:.0f} seconds" in WORDS
