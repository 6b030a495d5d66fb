"""The way to the daemon: each question has a deadline, and a daemon that does not answer is left alone for a while.

Nothing that happens behind the door is an error in front of it: whoever asks gets the answer, or None, and then the
engine computes what it would have computed without a cache.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import radixkv
from radixkv.adapters.vllm.breaker import PAUSE_FIRST_S, PAUSE_MAX_S, Breaker
from radixkv.client.sync import Client, Pool, pool_name
from radixkv.config import KVSpec
from radixkv.errors import BadRequest, ConfigError, LimitExceeded, OutOfPages, RadixKVError, SessionLost, StaleHandle
from radixkv.ipc.endpoint import resolve

T = TypeVar("T")

HEALTHY = (OutOfPages, BadRequest, LimitExceeded, SessionLost, StaleHandle)
"""Refusals of a daemon that is well: the next question may be answered."""
NO_LOADING = 1e15
"""Tokens a second. Said to be this fast, an engine is never made to wait for copies from a host tier."""

FROM_ENGINE = ("spec", "ranks")
"""Settings that nobody can give."""

_log = logging.getLogger("radixkv.adapters.vllm")


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """Where the daemon is and how patient to be: seconds a question may take, first and longest pause after a failure.

    spec: what the pool's pages must hold; ranks: how many workers hold them together. Another pool is treated like a
    daemon that is not there.
    """

    endpoint: str | None
    pool: str
    spec: KVSpec
    deadline_s: float = 0.5
    pause_first_s: float = PAUSE_FIRST_S
    pause_max_s: float = PAUSE_MAX_S
    ranks: int = 1


def door_settings(spec: KVSpec, ranks: int, given: Mapping[str, Any]) -> DoorSettings:
    """From vLLM's kv_connector_extra_config. Errors: ValueError for what is not a setting, or cannot be one's value."""
    known = [name for name in DoorSettings.__dataclass_fields__ if name not in FROM_ENGINE]
    unknown = sorted(str(name) for name in set(given) - set(known))
    if unknown:
        raise ValueError(f"kv_connector_extra_config has {', '.join(unknown)}; allowed: {', '.join(known)}")
    seconds = {name: given[name] for name in known if name.endswith("_s") and name in given}
    wrong = [name for name, value in seconds.items() if not _is_a_time(value)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} in kv_connector_extra_config; allowed: more than 0 seconds, a number")
    try:
        pool = pool_name(given.get("pool", "default"))
        resolve(given.get("endpoint"))
    except (BadRequest, ConfigError) as impossible:
        raise ValueError(f"pool or endpoint in kv_connector_extra_config: {impossible}") from None
    made = DoorSettings(given.get("endpoint"), pool, spec, ranks=ranks, **seconds)
    if made.pause_first_s > made.pause_max_s:
        raise ValueError(
            f"pause_first_s = {made.pause_first_s} in kv_connector_extra_config is more than pause_max_s = "
            f"{made.pause_max_s}; allowed: at most that"
        )
    return made


def _is_a_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


class Door:
    """Connects when first asked, and again when a daemon comes; for one thread, like each half of the connector."""

    def __init__(self, settings: DoorSettings) -> None:
        self.settings = settings
        self._breaker = Breaker(settings.pause_first_s, settings.pause_max_s)
        self._client: Client | None = None
        self._pool: Pool | None = None

    def ask(self, what: str, question: Callable[[Pool], T]) -> T | None:
        """The answer, or None: it was refused, it took too long, or the daemon is not asked at present."""
        if not self._breaker.lets_through(time.monotonic()):
            return None
        try:
            answer = question(self._fitting())
        except HEALTHY as refusal:
            _log.debug("%s: %s", what, refusal)
            self._well()
            return None
        except RadixKVError as failure:
            if not self._breaker.is_open:
                _log.warning("%s: %s; going on without the cache, which is tried again later", what, failure)
            self._breaker.failed(time.monotonic())
            return None
        self._well()
        return answer

    def close(self) -> None:
        client, self._client, self._pool = self._client, None, None
        if client is not None:
            with contextlib.suppress(RadixKVError):
                client.close()

    def _well(self) -> None:
        if self._breaker.is_open:
            _log.warning("the daemon answers again")
        self._breaker.succeeded()

    def _fitting(self) -> Pool:
        """The pool. Errors: those of connecting; ConfigError when its pages hold something else."""
        settings = self.settings
        if self._client is None:
            self._client = radixkv.connect(settings.endpoint, timeout=settings.deadline_s)
        if self._pool is None:
            try:
                self._pool = self._client.pool(settings.pool)
            except BadRequest as missing:  # to be told like a daemon that is missing; another one may have it
                raise ConfigError(str(missing)) from missing
            self._pool.prefill_tokens_per_s = NO_LOADING
        check(self._pool, settings)
        return self._pool


class Fitting(Protocol):
    """A pool, or its memory."""

    @property
    def spec(self) -> KVSpec: ...

    @property
    def ranks(self) -> int: ...


def check(found: Fitting, needed: DoorSettings) -> None:
    """Errors: ConfigError, with the difference, when a pool's pages are not what the engine needs."""
    pairs = [(name, getattr(found.spec, name), getattr(needed.spec, name)) for name in KVSpec.__dataclass_fields__]
    pairs.append(("ranks", found.ranks, needed.ranks))
    different = [f"{name} is {own}, needed {other}" for name, own, other in pairs if own != other]
    if different:
        raise ConfigError("the pool does not fit this engine: " + ", ".join(different))
