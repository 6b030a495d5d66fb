"""A worker's view of the pair, for scenarios that are told step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from fuzz.model.packing import pack_tokens, unpack_pages
from fuzz.pairs.engine import FAR, EnginePair
from radixkv import commands
from radixkv.config import Config, KVSpec, Limits, PoolConfig, ServerConfig

NAMESPACE = b"model"


def small_config(pages: int, page_size: int = 4, limits: Limits | None = None, **pool: Any) -> Config:
    """One pool ``a``; ``pool`` are further settings of it. Leases of 20 s."""
    spec = KVSpec(layers=1, kv_heads=1, head_dim=1, page_size=page_size)
    return Config(
        server=ServerConfig(lease_s=20.0),
        limits=limits or Limits(),
        pools=(PoolConfig(name="a", spec=spec, pages=pages, **pool),),
    )


def small_pair(pages: int, page_size: int = 4, limits: Limits | None = None, **pool: Any) -> EnginePair:
    return EnginePair(small_config(pages, page_size, limits, **pool))


class Held:
    """A sequence as the worker knows it from the replies it got."""

    def __init__(self, seq: int, reply: commands.Reserved) -> None:
        self.seq = seq
        self.pages = unpack_pages(reply.page_table)
        self.cached = reply.cached_tokens
        self.writable_from = reply.writable_from_tokens
        self.copy_rows = reply.copy_rows


class Driven(Protocol):
    """An engine and whatever is beside it: see ``EnginePair`` and ``Tiered``."""

    config: Config

    def open(self) -> int:
        """A new session."""

    def ask(self, session: int, body: commands.Body, deadline: float = FAR) -> commands.Reply | None:
        """A new request of it. None: it waits."""


class Worker:
    """One session. Methods that say ``try_`` return the reply, whatever it is; the others insist on success."""

    def __init__(self, pair: Driven) -> None:
        self.pair = pair
        self.session = pair.open()
        self.next_seq = 1

    def ask(self, body: commands.Body, deadline: float = FAR) -> Any:
        return self.pair.ask(self.session, body, deadline)

    def try_reserve(self, tokens: Iterable[int], namespace: bytes = NAMESPACE, **options: Any) -> Any:
        """``options``: headroom, last_page, wait_s, seq."""
        seq = options.pop("seq", self.next_seq)
        self.next_seq = max(self.next_seq, seq + 1)
        return self.ask(commands.Reserve("a", seq, namespace, pack_tokens(list(tokens)), **options))

    def reserve(self, tokens: Iterable[int], namespace: bytes = NAMESPACE, **options: Any) -> Held:
        seq = options.get("seq", self.next_seq)
        reply = self.try_reserve(tokens, namespace, **options)
        assert isinstance(reply, commands.Reserved), reply
        return Held(seq, reply)

    def cache(self, tokens: Sequence[int], namespace: bytes = NAMESPACE) -> list[int]:
        """Compute a prompt and let go of it: its full pages stay cached. Returns its page table."""
        held = self.compute(tokens, namespace)
        self.free(held)
        return held.pages

    def compute(self, tokens: Sequence[int], namespace: bytes = NAMESPACE, **options: Any) -> Held:
        """Reserve a prompt and commit all of it."""
        held = self.reserve(tokens, namespace, **options)
        self.commit(held, len(tokens))
        return held

    def step(self, **items: list[Any]) -> commands.Stepped:
        reply = self.ask(commands.Step(**items))
        assert isinstance(reply, commands.Stepped), reply
        return reply

    def commit(self, held: Held, n: int) -> None:
        assert self.step(commit=[commands.Commit(held.seq, n)]).commit == [None]

    def free(self, held: Held) -> None:
        assert self.step(free=[commands.Free(held.seq)]).free == [None]

    def try_extend(self, held: Held, tokens: Iterable[int] = (), headroom: int = 0) -> Any:
        return self.step(extend=[commands.Extend(held.seq, pack_tokens(list(tokens)), headroom)]).extend[0]

    def extend(self, held: Held, tokens: Iterable[int] = (), headroom: int = 0) -> list[int]:
        """Returns the new pages."""
        packed = self.try_extend(held, tokens, headroom)
        assert isinstance(packed, bytes), packed
        held.pages += unpack_pages(packed)
        return unpack_pages(packed)

    def truncate(self, held: Held, n: int) -> commands.Truncated:
        done = self.step(truncate=[commands.Truncate(held.seq, n)]).truncate[0]
        assert isinstance(done, commands.Truncated), done
        held.pages = held.pages[: done.kept_pages]
        if done.tail:
            held.pages[-1:] = unpack_pages(done.tail)
        return done

    def fork(self, held: Held, at: int | None = None, count: int = 1) -> list[Held]:
        first = self.next_seq
        self.next_seq += count
        done = self.step(share=[commands.Share(held.seq, at, count, first)]).share[0]
        assert isinstance(done, commands.Shared), done
        tails = unpack_pages(done.tails)
        children = []
        for index in range(count):
            child = Held(first + index, commands.Reserved(b"", done.at, done.shared_pages * self._page_size()))
            child.pages = held.pages[: done.shared_pages] + tails[index : index + 1]
            child.copy_rows = done.copy_rows[index : index + 1]
            children.append(child)
        return children

    def lookup(self, tokens: Iterable[int], namespace: bytes = NAMESPACE) -> int:
        """Cached tokens on the device."""
        return self.look(tokens, namespace)[0]

    def look(self, tokens: Iterable[int], namespace: bytes = NAMESPACE) -> tuple[int, int]:
        """Cached tokens on the device, and behind those in the host tier."""
        reply = self.ask(commands.Lookup("a", namespace, [pack_tokens(list(tokens))]))
        assert isinstance(reply, commands.LookedUp), reply
        return reply.device_tokens[0], reply.host_tokens[0]

    def invalidate(self, namespace: bytes = NAMESPACE) -> int:
        reply = self.ask(commands.Invalidate("a", namespace))
        assert isinstance(reply, commands.Invalidated), reply
        return reply.epoch

    def _page_size(self) -> int:
        return self.pair.config.pools[0].spec.page_size


def counts(pair: EnginePair) -> dict[str, int]:
    """Pages by state, those that are not there left out."""
    return {state: number for state, number in pair.real.snapshot()["pools"]["a"]["pages"].items() if number}


def workers(pages: int, count: int, **pool: Any) -> tuple[Any, ...]:
    """A pair with one small pool, and so many workers."""
    pair = small_pair(pages, **pool)
    return (pair, *[Worker(pair) for _ in range(count)])


def code(reply: Any) -> str:
    """The code of an error; anything else fails."""
    assert isinstance(reply, commands.Failure), reply
    return reply.code


def refused_for_pages(reply: Any, need: int, available: int) -> None:
    """Fails unless the reply is out_of_pages with these numbers."""
    assert code(reply) == "out_of_pages"
    assert (reply.details["need"], reply.details["available"]) == (need, available)
