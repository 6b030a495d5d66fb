"""The workers of a tensor-parallel engine as the ranks of one pool.

Rank 0 has the session and asks the daemon; a page has the same number on all ranks, and each rank copies its own part.
An engine of one worker is the same with nobody to tell.

::

    rank 0        hold: reserve ── which pages ──┐             ┌── went well everywhere, and valid? ── commit, free
    all ranks                                    └─> copy ──> done

vLLM's scheduler gives all workers of a step the same loads and saves in the same order, so that each ``tell`` and each
``all_well`` of one rank meets those of the others.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed

import radixkv
from radixkv.adapters.vllm.door import Door, DoorSettings, check
from radixkv.client.namespace import Namespace
from radixkv.client.ranks import Member
from radixkv.client.sync import Pool, Sequence
from radixkv.errors import RadixKVError, SessionLost

TOKEN_BYTES = 24
"""Of a group token."""
PAGE_BYTES = 4

_log = logging.getLogger("radixkv.adapters.vllm")


class Ranks(Protocol):
    """The workers of one engine. ``count``: how many."""

    @property
    def count(self) -> int: ...

    def tell(self, message: bytes) -> bytes:
        """Rank 0's message, on every rank."""

    def all_well(self, well: bool) -> bool:
        """Whether all ranks said so, on every rank."""


class Alone:
    count = 1

    def tell(self, message: bytes) -> bytes:
        return message

    def all_well(self, well: bool) -> bool:
        return well


class Together:
    """``group``: a torch.distributed process group on CPUs, such as vLLM has for its tensor-parallel workers."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._first = torch.distributed.get_global_rank(group, 0)
        self.count = torch.distributed.get_world_size(group)

    def tell(self, message: bytes) -> bytes:
        size = torch.tensor([len(message)])
        torch.distributed.broadcast(size, self._first, self._group)
        if not size.item():
            return b""
        content = torch.zeros(int(size.item()), dtype=torch.uint8)
        if message:
            content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        torch.distributed.broadcast(content, self._first, self._group)
        return content.numpy().tobytes()

    def all_well(self, well: bool) -> bool:
        answer = torch.tensor([int(well)])
        torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MIN, group=self._group)
        return bool(answer.item())


@dataclass(frozen=True, slots=True)
class Held:
    """Pages to copy to or from, in this rank's memory. None: this rank cannot reach it, which it says in ``done``."""

    memory: Any
    pages: torch.Tensor


class Side(Protocol):
    """One rank's part of a copy. After a ``hold`` that gave something there is one ``done``."""

    def hold(
        self, what: str, namespace: Namespace, tokens: bytes, choose: Callable[[Sequence], list[int]]
    ) -> Held | None:
        """The pages that ``choose`` takes of the sequence for these tokens. None: there are none to be had."""

    def done(self, well: bool, commit_tokens: int = 0) -> bool:
        """Publish so many tokens if all ranks copied well, and let go. Whether what was copied may be used."""


class Leader:
    """Rank 0, or the only one."""

    def __init__(self, door: Door, ranks: Ranks) -> None:
        self._door = door
        self._ranks = ranks
        self._held: tuple[str, Sequence] | None = None

    def hold(
        self, what: str, namespace: Namespace, tokens: bytes, choose: Callable[[Sequence], list[int]]
    ) -> Held | None:
        def reserve(pool: Pool) -> tuple[Sequence, bytes]:
            token = pool.client.group_token if self._ranks.count > 1 else bytes(TOKEN_BYTES)
            with contextlib.ExitStack() as undo:
                seq = undo.enter_context(pool.reserve(tokens, namespace=namespace, last_page="keep"))
                memory: Any = seq.memory
                check(memory, self._door.settings)
                undo.pop_all()
            return seq, token

        found = self._door.ask(what, reserve)
        pages = choose(found[0]) if found is not None else []
        self._ranks.tell(found[1] + packed(pages) if found is not None else b"")
        if found is None:
            return None
        self._held = what, found[0]
        return Held(found[0].memory, indices(pages))

    def done(self, well: bool, commit_tokens: int = 0) -> bool:
        assert self._held is not None
        (what, seq), self._held = self._held, None
        well = self._ranks.all_well(well)

        def end(_: Pool) -> bool:
            with seq:
                # The pages may have been taken from us (a lapsed session, a restarted daemon) while we copied.
                if not well or not seq.valid():
                    raise SessionLost("pages of the sequence were given to another one, or a rank could not copy")
                if commit_tokens:
                    seq.free(commit=commit_tokens)
            return True

        return bool(self._door.ask(what, end))


class Follower:
    """Rank 1, 2, ...: joins the session of rank 0, also again when that has a new one."""

    def __init__(self, settings: DoorSettings, ranks: Ranks, rank: int) -> None:
        self._settings = settings
        self._ranks = ranks
        self._rank = rank
        self._joined: tuple[bytes, Member] | None = None

    def hold(
        self, what: str, namespace: Namespace, tokens: bytes, choose: Callable[[Sequence], list[int]]
    ) -> Held | None:
        del what, namespace, tokens, choose  # rank 0 asks, and tells what it got
        message = self._ranks.tell(b"")
        if not message:
            return None
        return Held(self._memory(message[:TOKEN_BYTES]), unpacked(message[TOKEN_BYTES:]))

    def done(self, well: bool, commit_tokens: int = 0) -> bool:
        del commit_tokens
        return self._ranks.all_well(well)

    def close(self) -> None:
        joined, self._joined = self._joined, None
        if joined is not None:
            joined[1].close()

    def _memory(self, token: bytes) -> Any:
        """This rank's arena in the session of ``token``, or None."""
        settings = self._settings
        try:
            if self._joined is None or self._joined[0] != token or not self._joined[1].valid():
                self.close()
                self._joined = token, radixkv.attach(settings.endpoint, token, self._rank, settings.deadline_s)
            pool = self._joined[1].pool(settings.pool)
            check(pool, settings)
        except RadixKVError as failure:
            _log.warning("rank %d: %s; going on without the cache", self._rank, failure)
            return None
        return pool


def packed(pages: list[int]) -> bytes:
    return b"".join(page.to_bytes(PAGE_BYTES, "little") for page in pages)


def unpacked(pages: bytes) -> torch.Tensor:
    return indices([int.from_bytes(pages[n : n + PAGE_BYTES], "little") for n in range(0, len(pages), PAGE_BYTES)])


def indices(numbers: Any) -> torch.Tensor:
    """Also of nothing, which torch would take for floats."""
    return torch.tensor([int(number) for number in numbers], dtype=torch.long)
