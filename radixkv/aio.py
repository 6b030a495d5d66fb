"""The public client for asyncio: the verbs of ``radixkv.client.sync``, as coroutines. What they mean is the same.

::

    async with await radixkv.aio.connect() as client:
        pool = await client.pool("default")
        async with await pool.reserve(tokens, namespace=radixkv.Namespace("llama")) as seq:
            ...                     # compute tokens from seq.cached_tokens on, into the pages of seq.page_table
            await seq.commit(len(tokens))

A cancelled call leaves nothing behind: a reserve that waits is taken out of the daemon's queue, pages that come all the
same go back, and what a cancelled call did to a sequence is found out before the sequence's next one.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Coroutine, Iterable
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from radixkv.client import asking, sync
from radixkv.client.effects import Verb
from radixkv.client.handles import PoolHandle, SequenceHandle
from radixkv.client.loop import LoopLink, in_thread
from radixkv.client.ranks import group_token
from radixkv.client.sequence import Grant
from radixkv.client.session import Session
from radixkv.errors import RadixKVError, Unavailable
from radixkv.ipc.endpoint import resolve

__all__ = ["connect", "Client", "Pool", "Sequence"]

P = ParamSpec("P")
T = TypeVar("T")


@overload
def awaited(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]: ...


@overload
def awaited(
    method: Callable[Concatenate[Any, P], Any], gives: type[T]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]: ...


def awaited(method: Callable[..., Any], gives: Any = None) -> Callable[..., Any]:  # noqa: ARG001 - for the type checker
    """The blocking shell's method as a coroutine: same arguments, same documentation, another ``_run`` behind it."""

    @wraps(method)
    async def call(self: Any, *args: Any, **keywords: Any) -> Any:
        return await method(self, *args, **keywords)

    return call


async def connect(endpoint: str | os.PathLike[str] | None = None, timeout: float = sync.TIMEOUT_S) -> Client:
    link = LoopLink(resolve(endpoint), asking.seconds("timeout", timeout))
    try:
        await in_thread(link.open)
    except BaseException:
        link.let_go()
        raise
    return Client(link)


connect.__doc__ = sync.connect.__doc__


class Client:
    """A session with a daemon. When a new daemon takes its place, the client connects to it by itself.

    For any event loop: a call belongs to the loop that it is awaited in.
    """

    def __init__(self, link: LoopLink) -> None:
        self._link = link
        self._finalizer = weakref.finalize(self, link.let_go)

    async def pool(self, name: str = "default") -> Pool:
        self._link.check()
        pool = await self._link.attach(Pool(self, self._link, sync.pool_name(name)))
        assert isinstance(pool, Pool)
        return pool

    pool.__doc__ = sync.Client.pool.__doc__
    stats = awaited(sync.Client.stats)

    @property
    def group_token(self) -> bytes:
        """With it the other processes of a group join this session, as its ranks (``radixkv.attach``).

        Waits for nobody. A session that goes on after a restart keeps its token; a new one has another.
        Errors: Unavailable (no session), Forked.
        """
        self._link.check()
        session = self._link.core.session
        if session is None:
            raise Unavailable("there is no session at present")
        return group_token(session.welcome)

    async def close(self) -> None:
        self._finalizer.detach()
        await in_thread(self._link.close)

    close.__doc__ = sync.Client.close.__doc__

    def _run(self, verb: Verb[T]) -> Coroutine[Any, Any, T]:
        return self._link.perform(verb)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    __repr__ = sync.Client.__repr__


class Sequence(SequenceHandle):
    __doc__ = sync.Sequence.__doc__
    __slots__ = ()

    pool: Pool

    wait_loaded = awaited(sync.Sequence.wait_loaded)
    commit = awaited(sync.Sequence.commit)
    extend = awaited(sync.Sequence.extend)
    truncate = awaited(sync.Sequence.truncate)
    share = awaited(sync.Sequence.share, list["Sequence"])
    copied = awaited(sync.Sequence.copied)
    free = awaited(sync.Sequence.free)
    handoff = awaited(sync.Sequence.handoff)
    compact = awaited(sync.Sequence.compact)
    suspend = awaited(sync.Sequence.suspend)
    resume = awaited(sync.Sequence.resume)

    def _run(self, verb: Verb[T]) -> Coroutine[Any, Any, T]:
        return self.pool._run(verb, (self,))

    async def __aenter__(self) -> Sequence:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.free()
        except sync.NOT_WORTH_RAISING:
            return
        except RadixKVError:
            if error is None:
                raise


class Pool(PoolHandle):
    __doc__ = sync.Pool.__doc__

    client: Client
    link: LoopLink

    reserve = awaited(sync.Pool.reserve, Sequence)
    adopt = awaited(sync.Pool.adopt, Sequence)
    lookup = awaited(sync.Pool.lookup)
    prefetch = awaited(sync.Pool.prefetch)
    step = awaited(sync.Pool.step)
    invalidate = awaited(sync.Pool.invalidate)
    flush = awaited(sync.Pool.flush)

    def make(self, session: Session, grant: Grant) -> Sequence:
        return Sequence(self, session, grant)

    def _run(self, verb: Verb[T], sequences: Iterable[Any] = ()) -> Coroutine[Any, Any, T]:
        return self.link.perform(verb, sequences)
