"""One sequence's pages: shared through the daemon, or local to this process when there is none.

The rest of the adapter sees only ``Pages`` and cannot tell the two apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.config import KVSpec, Layout
from radixkv.errors import OutOfPages, RadixKVError
from radixkv.kernels import Pages as KernelPages
from radixkv.kernels import views as layer_views

LayerViews = tuple[KernelPages, KernelPages]
"""One layer's keys and values, each [pages, page_size, kv_heads, head_dim], perhaps quantized."""


class Pages(Protocol):
    """What a cache and a sequence need to know about where their keys and values lie."""

    layers: int
    page_size: int
    cached_tokens: int
    writable_from_tokens: int
    shared: bool

    @property
    def page_table(self) -> NDArray[np.int32]: ...

    def views(self, layer: int) -> LayerViews: ...

    def publish(self, tokens: Tokens[int], written: int, headroom: int, /) -> None:
        """Keys and values of the first ``written`` tokens are complete; make room ahead for ``headroom`` more."""

    def make_room(self, tokens: Tokens[int], headroom: int, /) -> None:
        """Make sure there is room for all ``tokens`` and ``headroom`` more. Raises OutOfPages."""

    def valid(self) -> bool:
        """Do all pages still belong to this sequence? Asked after computing, before a result is used."""

    def finish(self, tokens: Tokens[int], written: int, /) -> None:
        """Publish what is complete. The sequence ends; ``release`` follows."""

    def release(self) -> None:
        """Give the pages back. Never raises because of a daemon that is gone."""

    def abandon(self) -> None:
        """Like ``release``, when the daemon may not answer: does not wait for it."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """How pages are reserved: pool and namespace of radixkv.client; seconds to wait for a full pool."""

    pool: Any
    namespace: Any
    timeout_s: float | None = None


class SharedPages:
    """Pages of a daemon's pool. One message a page: commit what is complete, append the tokens since, extend ahead."""

    shared = True

    def __init__(self, pool: Any, seq: Any) -> None:
        self._pool = pool
        self._seq = seq
        self.layers = pool.spec.layers
        self.page_size = pool.page_size
        self.cached_tokens = seq.committed_tokens
        self.writable_from_tokens = seq.writable_from_tokens
        self._published = seq.committed_tokens

    @classmethod
    def reserve(cls, reservation: Reservation, tokens: Tokens[int], headroom: int) -> SharedPages:
        """Raises OutOfPages, Unavailable, Timeout, SessionLost, Draining, BadRequest as the client does."""
        pool, namespace = reservation.pool, reservation.namespace
        return cls(
            pool, pool.reserve(tokens, namespace=namespace, headroom_tokens=headroom, timeout=reservation.timeout_s)
        )

    @classmethod
    def adopt(cls, reservation: Reservation, ticket: bytes) -> SharedPages:
        """Raises StaleHandle, Unavailable, Timeout, SessionLost as the client does."""
        return cls(reservation.pool, reservation.pool.adopt(ticket))

    @property
    def tokens(self) -> list[int]:
        """Those that the daemon knows."""
        known: list[int] = self._seq.tokens.tolist()
        return known

    def handoff(self, tokens: Tokens[int], written: int, ttl_s: float) -> bytes:
        """A ticket for the sequence with all ``tokens``, of which ``written`` are complete. It is over here."""
        seq = self._seq
        if len(tokens) > seq.length:
            seq.extend(tokens[seq.length :])
        seq.commit(written)
        ticket: bytes = seq.handoff(ttl_s)
        return ticket

    @property
    def page_table(self) -> NDArray[np.int32]:
        table: NDArray[np.int32] = self._seq.page_table
        return table

    def views(self, layer: int) -> LayerViews:
        # The memory the sequence was reserved in: after a restart the pool's own views are of the next daemon's arena.
        memory = self._seq.memory
        return memory.keys(layer), memory.values(layer)

    def publish(self, tokens: Tokens[int], written: int, headroom: int) -> None:
        """Does nothing unless a page has become complete since the last time.

        In a step commits come before extends, so only tokens the daemon knew before can be committed: generated pages
        become visible one page later, at no extra message.
        """
        if written // self.page_size == self._published // self.page_size:
            return
        seq, known = self._seq, self._seq.length
        grows = len(tokens) > known or len(tokens) + headroom > seq.capacity_tokens
        result = self._pool.step(
            commit={seq: min(written, known)},
            extend={seq: (list(tokens[known:]), headroom)} if grows else {},
        )
        self._published = written
        _raise(result.commit[seq])
        with contextlib.suppress(OutOfPages):  # not needed yet: make_room asks again when it is
            _raise(result.extend.get(seq))

    def make_room(self, tokens: Tokens[int], headroom: int) -> None:
        if len(tokens) + headroom > self._seq.capacity_tokens:
            self._seq.extend(tokens[self._seq.length :], headroom_tokens=headroom)

    def valid(self) -> bool:
        return bool(self._seq.valid())

    def finish(self, tokens: Tokens[int], written: int) -> None:
        seq = self._seq
        if written // self.page_size > seq.committed_tokens // self.page_size:
            if written > seq.length:
                seq.extend(tokens[seq.length : written])
            seq.commit(written)

    def release(self) -> None:
        with contextlib.suppress(RadixKVError):
            self._seq.free()

    def abandon(self) -> None:
        if self._seq.session.over:
            return  # everything it held ended with it
        with contextlib.suppress(RadixKVError):
            self._seq.free(after=_Soon())


class LocalPages:
    """Pages of this process alone, in the same layout: nothing is cached, nothing is published."""

    shared = False
    cached_tokens = 0
    writable_from_tokens = 0

    def __init__(self, spec: KVSpec, tokens: int) -> None:
        """Room for ``tokens``. The memory is touched, and so taken, only as it is written."""
        self.layers = spec.layers
        self.page_size = spec.page_size
        count = max(1, -(-tokens // spec.page_size))
        self.page_table = np.arange(count, dtype=np.int32)
        arena = torch.empty(count * spec.page_bytes, dtype=torch.uint8)
        self._views = layer_views(arena, Layout.of(spec), count)

    def views(self, layer: int) -> LayerViews:
        return self._views[layer]

    def publish(self, _tokens: Tokens[int], _written: int, _headroom: int) -> None:
        return

    def make_room(self, tokens: Tokens[int], headroom: int) -> None:
        need = -(-(len(tokens) + headroom) // self.page_size)
        if need > len(self.page_table):
            raise OutOfPages("more tokens than were announced", need=need, available=len(self.page_table))

    def valid(self) -> bool:
        return True

    def finish(self, _tokens: Tokens[int], _written: int) -> None:
        return

    def release(self) -> None:
        self._views = []

    abandon = release


class _Soon:
    """A fence that is done when it is looked at again: what is behind it goes out without anyone waiting for it."""

    _seen = False

    def query(self) -> bool:
        seen, self._seen = self._seen, True
        return seen

    def synchronize(self) -> None:
        return


def _raise(result: object) -> None:
    if isinstance(result, Exception):
        raise result
