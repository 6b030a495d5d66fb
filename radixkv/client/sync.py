"""The public client, blocking and thread-safe. What the verbs mean is in ``docs/protocol.md``.

::

    with radixkv.connect() as client:
        pool = client.pool("default")
        with pool.reserve(tokens, namespace=radixkv.Namespace("llama")) as seq:
            ...                     # compute tokens from seq.cached_tokens on, into the pages of seq.page_table
            seq.commit(len(tokens))

A method reads its arguments, makes a verb of them and ends in ``return self._run(verb)``: ``radixkv.aio`` uses the same
methods with another ``_run``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AnySequence
from types import TracebackType
from typing import Any, TypeVar, cast

import numpy as np

from radixkv.client import asking, verbs
from radixkv.client import step as steps
from radixkv.client import suspend as suspending
from radixkv.client.batch import ShareItem, TruncateItem, natural
from radixkv.client.effects import Verb
from radixkv.client.handles import PoolHandle, SequenceHandle
from radixkv.client.link import Link, Locked
from radixkv.client.namespace import Namespace
from radixkv.client.outbox import Event
from radixkv.client.ranks import group_token
from radixkv.client.retain import Retain, on_the_wire
from radixkv.client.sequence import Grant
from radixkv.client.session import Session
from radixkv.client.snapshot import Snapshot
from radixkv.client.tokens import Tokens, pack
from radixkv.client.verbs import Want
from radixkv.config import LAST_PAGE_MODES
from radixkv.errors import BadRequest, Forked, RadixKVError, SessionLost, Timeout, Unavailable
from radixkv.ipc.endpoint import resolve

T = TypeVar("T")

TIMEOUT_S = 5.0
TICKET_TTL_S = 30.0
NAME_MAX = 64
_NO_NAMESPACE = Namespace("")
NOT_WORTH_RAISING = (SessionLost, Unavailable, Timeout, Forked)
"""What leaving a ``with`` block keeps to itself: the pages come back without it, or are not ours to give back."""


def connect(endpoint: str | os.PathLike[str] | None = None, timeout: float = TIMEOUT_S) -> Client:
    """A client of the daemon at an endpoint ("ipc://PATH" or a path; None: $RADIXKV_ENDPOINT, then the default).

    ``timeout``: seconds, here and for each later call, until an answer is there.
    Errors: Unavailable (nobody answers), VersionMismatch, PermissionDenied (another user's daemon), Draining,
    LimitExceeded (too many sessions), ConfigError (no possible endpoint).
    """
    link = Link(resolve(endpoint), asking.seconds("timeout", timeout))
    link.open()
    return Client(link)


class Client:
    """A session with a daemon. When a new daemon takes its place, the client connects to it by itself."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._finalizer = weakref.finalize(self, link.let_go)

    def pool(self, name: str = "default") -> Pool:
        """Attach and map a pool. Errors: BadRequest when the daemon has none of that name."""
        self._link.check()
        pool = self._link.attach_pool(Pool(self, self._link, pool_name(name)))
        assert isinstance(pool, Pool)
        return pool

    def stats(self) -> Snapshot:
        """A frozen snapshot of the daemon: attributes and items."""
        return self._run(verbs.stats())

    @property
    def group_token(self) -> bytes:
        """With it the other processes of a group join this session, as its ranks (``radixkv.attach``).

        Waits for a daemon as every call does. A session that goes on after a restart keeps its token; a new one has
        another. Errors: Unavailable, Forked.
        """
        self._link.check()
        return group_token(self._link.connection(self._link.core.clock() + self._link.core.timeout).session.welcome)

    def close(self) -> None:
        """End the session: pages of sequences that were not freed go back. Closing twice is a no-op.

        Fenced operations are waited for up to a second; pages that a device may write to even then stay out of use as
        long as this process lives.
        """
        self._finalizer.detach()
        self._link.close()

    def _run(self, verb: Verb[T]) -> T:
        return self._link.run(verb)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._link.closed else "connected" if self._link.present() else "no daemon"
        return f"<Client of {self._link.endpoint.address}: {state}>"


class Pool(PoolHandle):
    """Pages of one KV spec, shared by all workers of a machine; its memory is mapped into this process."""

    client: Client

    def reserve(  # noqa: PLR0913 - the public contract
        self,
        tokens: Tokens,
        *,
        namespace: Namespace = _NO_NAMESPACE,
        headroom_tokens: int = 0,
        timeout: float | None = None,
        last_page: str = "copy",
        copy: bool = True,
        retain: Retain | Iterable[Retain] = (),
        join_timeout: float = 0.0,
        wait_loaded: bool = True,
    ) -> Sequence:
        """A sequence for these tokens: cached prefix pages, then private pages with room for ``headroom_tokens`` more.

        timeout: seconds to queue for pages; None or 0: OutOfPages at once. Copies from and to a host tier are waited
        for besides, up to 5 s: then what is in the host tier is computed again.
        last_page: how the last page of a fully cached prompt is given: "copy", "keep" or "drop".
        copy: False leaves copy_rows to the caller, as is always so on CUDA pools.
        retain: how firmly its pages are kept later, in ranges of tokens, in order. Forks have the same.
        join_timeout: seconds to wait for another worker that is computing the same prefix right now; then, or when that
        one is gone, this one computes it. Besides ``timeout``, and before it.
        wait_loaded: False: do not wait until what the host tier has is on the device; ``Sequence.loading`` says which
        pages are still coming, ``Sequence.wait_loaded`` waits for them.
        Errors: OutOfPages, BadRequest, LimitExceeded, Draining, Timeout, Unavailable.
        """
        if last_page not in LAST_PAGE_MODES:
            raise BadRequest(f"last_page is one of {', '.join(LAST_PAGE_MODES)}, not {last_page!r}")
        headroom = natural("headroom_tokens", headroom_tokens)
        wait_s = 0.0 if timeout is None else asking.seconds("timeout", timeout)
        join_s = asking.seconds("join_timeout", join_timeout)
        want = Want(
            _namespace(namespace), pack(tokens), headroom, last_page, wait_s, copy, on_the_wire(retain), join_s,
            early=not wait_loaded,
        )  # fmt: skip
        return cast("Sequence", self._run(verbs.reserve(self.core, self, want)))

    def adopt(self, ticket: bytes, *, copy: bool = True) -> Sequence:
        """Take over a sequence that another client handed off. Errors: StaleHandle (used, over its time, unknown)."""
        return cast("Sequence", self._run(verbs.adopt(self.core, self, ticket, copy)))

    def lookup(self, tokens: Any, *, namespace: Namespace = _NO_NAMESPACE) -> Any:
        """How much of a prompt is cached: ``Found``; for a list of prompts a list of them. Changes nothing."""
        many = _is_many(tokens)
        prompts = [pack(prompt) for prompt in tokens] if many else [pack(tokens)]
        found = verbs.lookup(self, _namespace(namespace), prompts)
        return self._run(found) if many else self._run(_only(found))

    def prefetch(
        self, tokens: Tokens, *, namespace: Namespace = _NO_NAMESPACE, timeout: float | None = None
    ) -> verbs.Found:
        """Bring to the device what the host tier has of a prompt. Returns, when it is there, what ``lookup`` would say.

        Holds nothing: what is not used soon may leave again. ``host_tokens`` is what could not be brought.
        timeout: seconds until Timeout (the copies go on all the same); None: the client's, and 5 s for copies.
        Errors: OutOfPages, BadRequest, LimitExceeded, Timeout, Unavailable.
        """
        limit = None if timeout is None else asking.seconds("timeout", timeout)
        return self._run(verbs.prefetch(self.core, self, _namespace(namespace), pack(tokens), limit))

    def step(  # noqa: PLR0913 - the public contract
        self,
        *,
        free: Iterable[Any] = (),
        truncate: Mapping[Any, Any] | None = None,
        commit: Mapping[Any, Any] | None = None,
        extend: Mapping[Any, Any] | None = None,
        share: Mapping[Any, Any] | None = None,
        copy: bool = True,
    ) -> steps.StepResult:
        """A batch in one round trip, in this order: free, truncate, commit, extend, share (see ``client/step.py``).

        free=[seq or (seq, event)], truncate={seq: n or (n, event)}, commit={seq: n or (n, event)},
        extend={seq: tokens or (tokens, headroom)}, share={seq: (at, count)}. Each item succeeds or fails alone; the
        result mirrors the arguments. Raises only if the whole message failed.
        """
        plan = steps.Plan(list(free), truncate, commit, extend, share, copy)
        return self._run(steps.step(self.core, plan), plan.sequences())

    def invalidate(self, namespace: Namespace) -> int:
        """Old pages of this namespace never match again. Returns its new epoch."""
        return self._run(verbs.invalidate(self, _namespace(namespace)))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything fenced has gone out and is answered. Raises the first deferred error, or Timeout.

        timeout: seconds; None: as long as the events take.
        """
        return self._run(verbs.flush(self.core, self, timeout))

    def make(self, session: Session, grant: Grant) -> Sequence:
        return Sequence(self, session, grant)

    def _run(self, verb: Verb[T], locks: Iterable[Locked] = ()) -> T:
        return self.link.run(verb, locks)


class Sequence(SequenceHandle):
    """One request's tokens and pages. Leaving a ``with`` block frees it; it commits nothing.

    ``after=`` of a verb: an event (``query``, ``synchronize``) of the device work that the verb has to come after. The
    call then returns at once, and the message goes out when the event is done; until it is answered, the sequence's
    numbers and page table are what they were. Verbs without a fence queue behind those of the same sequence that have
    one, except extend and share, which wait for a pending truncate only.
    """

    __slots__ = ()

    pool: Pool

    def wait_loaded(self, layer: int | None = None, timeout_s: float | None = None) -> None:
        """Wait until the pages of ``loading`` are there, all of them or this layer of all of them: then it may be read.

        timeout_s: None: the client's, and 5 s for copies. Commit, truncate, share, handoff, compact and suspend wait
        for all by themselves. Errors: CopyFailed (they never come: free it), BadRequest (no such layer), Timeout,
        StaleHandle, SessionLost.
        """
        limit = None if timeout_s is None else asking.seconds("timeout_s", timeout_s)
        number = None if layer is None else natural("layer", layer)
        if number is not None and number >= self.memory.spec.layers:
            raise BadRequest("there is no such layer", layer=number, layers=self.memory.spec.layers)
        return self._run(asking.wait_loaded(self.pool.core, self, number, limit))

    def commit(self, n_tokens: int, after: Event | None = None) -> None:
        """KV of the first n tokens is written and complete: full pages become visible to others.

        Errors: BadRequest (over length, or less than committed), StaleHandle, SessionLost.
        """
        return self._run(verbs.commit(self.pool.core, self, n_tokens, after))

    def extend(self, tokens: Tokens = (), headroom_tokens: int = 0) -> None:
        """Append tokens; afterwards there is room for at least ``headroom_tokens`` more. All or nothing.

        Errors: OutOfPages, BadRequest, LimitExceeded, StaleHandle, SessionLost.
        """
        return self._run(verbs.extend(self.pool.core, self, pack(tokens), headroom_tokens))

    def truncate(self, n_tokens: int, after: Event | None = None, *, copy: bool = True) -> None:
        """Keep exactly the first n tokens and no headroom. Errors: BadRequest, OutOfPages, StaleHandle, SessionLost."""
        return self._run(verbs.truncate(self.pool.core, TruncateItem(self, n_tokens, copy), after))

    def share(self, at: int | None = None, count: int = 1, *, copy: bool = True) -> list[Sequence]:
        """Fork ``count`` children that begin with the first ``at`` tokens (None: all committed ones).

        Errors: BadRequest (at over committed), OutOfPages, StaleHandle, SessionLost.
        """
        return cast("list[Sequence]", self._run(verbs.share(self.pool.core, ShareItem(self, at, count, copy))))

    def copied(self, after: Event | None = None) -> None:
        """The caller has carried out copy_rows; their source pages are released."""
        return self._run(verbs.copied(self.pool.core, self, after))

    def free(self, after: Event | None = None, *, commit: int = 0) -> None:
        """Give the sequence up: committed full pages stay cached, the rest goes back. Twice is a no-op, and so it
        is once a call has raised SessionLost.

        ``commit``: the first so many tokens are complete; as ``commit(n)`` just before, in the same round trip. If that
        is refused the error is raised, and the sequence is given up all the same.
        """
        return self._run(verbs.free(self.pool.core, self, after, commit))

    def handoff(self, ttl: float = TICKET_TTL_S, after: Event | None = None) -> bytes:
        """A ticket by which another client adopts this sequence within ``ttl`` seconds; here it is over.

        Waits for its earlier fenced operations unless ``after`` is pending, and in any case for those of others that
        say that the caller has copied rows from its pages. Errors: BadRequest (nobody has said so), StaleHandle,
        SessionLost.
        """
        return self._run(verbs.handoff(self.pool.core, self, ttl, after))

    def compact(self) -> None:
        """Name the canonical pages instead of our own copies of them: a new page table."""
        return self._run(verbs.compact(self.pool.core, self))

    def suspend(self, after: Event | None = None) -> None:
        """Give all pages up and keep the tokens: for engines that preempt. What is committed in full pages stays cached
        (and moves to the host tier as it grows cold); the page begun is kept in this process's memory.

        Until ``resume`` all verbs but ``free`` are refused. Waits for ``after``, as long as that takes.
        Errors: StaleHandle, SessionLost, Unavailable.
        """
        return self._run(suspending.suspend(self.pool.core, self, after))

    def resume(self, timeout: float | None = None) -> None:
        """Come back after ``suspend``, with a new page table.

        ``committed_tokens`` is what it was, or less if cached pages were evicted meanwhile: then the rest has to be
        computed again.

        ``timeout`` as for ``Pool.reserve``; errors too, and after one it is still suspended.
        """
        wait_s = 0.0 if timeout is None else asking.seconds("timeout", timeout)
        return self._run(suspending.resume(self.pool.core, self, wait_s))

    def _run(self, verb: Verb[T]) -> T:
        return self.pool._run(verb, (self,))

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.free()
        except NOT_WORTH_RAISING:
            return
        except RadixKVError:
            if error is None:
                raise


def pool_name(given: Any) -> str:
    if not isinstance(given, str) or not 0 < len(given) <= NAME_MAX or not given.isprintable():
        raise BadRequest(f"a pool's name has 1 to {NAME_MAX} printable characters, not {given!r:.80}")
    return given


def _namespace(given: Any) -> Namespace:
    if not isinstance(given, Namespace):
        raise BadRequest(f"namespace is a radixkv.Namespace, not {type(given).__name__}")
    return given


def _only(found: Verb[list[verbs.Found]]) -> Verb[verbs.Found]:
    return (yield from found)[0]


def _is_many(tokens: Any) -> bool:
    """A list of prompts, rather than a prompt that is a list: its first element is itself a prompt."""
    return (
        isinstance(tokens, AnySequence)
        and not isinstance(tokens, str | bytes | bytearray | memoryview)
        and len(tokens) > 0
        and isinstance(tokens[0], AnySequence | np.ndarray)
    )
