"""What a worker can ask and what comes back; what the daemon tells its own core; what the core tells the edges.

These are plain records. How they are framed is ``ipc/wire.py``; what they do is ``engine/engine.py``. On the wire a
record is an array whose first item is its tag; **tags are never reused and fields are only ever added at the end**.

Units: ``tokens`` are packed little-endian uint32, ``pages`` packed little-endian int32, times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from radixkv.errors import RadixKVError

Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Wait = Annotated[float, Meta(ge=0.0, le=86400.0)]
Ticket = Annotated[bytes, Meta(min_length=16, max_length=16)]
Canonical = Annotated[bytes, Meta(max_length=1024)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]

CopyRow = tuple[int, int, int]
"""(source page, target page, rows): the first ``rows`` token rows of the source belong into the target."""


# -- items of one Step, in the order in which a Step carries them out ---------------------------------------------


class Free(Struct, array_like=True, frozen=True):
    """The sequence is over. ``commit``: its first n tokens are complete, as by a commit just before (0: nothing new).

    If that is refused, the refusal is the answer, and the sequence is over all the same.
    """

    seq: Natural
    commit: Natural = 0


class Truncate(Struct, array_like=True, frozen=True):
    """Exactly the first n tokens stay, without headroom."""

    seq: Natural
    n: Natural


class Commit(Struct, array_like=True, frozen=True):
    """KV of the first n tokens is written and complete (absolute, counted from token 0)."""

    seq: Natural
    n: Natural


class Extend(Struct, array_like=True, frozen=True):
    """Append tokens; guarantee room for ``headroom`` more."""

    seq: Natural
    tokens: bytes = b""
    headroom: Natural = 0


class Share(Struct, array_like=True, frozen=True):
    """Fork ``count`` children at a token <= committed (None: at committed). Their ids: first_child, +1, ..."""

    seq: Natural
    at: Natural | None
    count: Natural
    first_child: Natural


# -- commands of a worker -----------------------------------------------------------------------------------------


COPY_WAIT_S = 5.0
"""How long a reserve or a prefetch waits, at most, for copies between the tiers: besides the time that it may wait for
pages, of which the worker has to know."""


class Retain(Struct, array_like=True, frozen=True):
    """Pages whose first token is one of [start, end) get a priority when the sequence lets go of them.

    0: leave first, 50: as all others, 100: pinned, leave when nothing else can. ``for_s``: seconds from then on, after
    which they are like all others; None: as long as they are cached. ``end``: None: to the end, whatever is appended.
    """

    priority: Annotated[int, Meta(ge=0, le=100)]
    for_s: Wait | None = None
    start: Natural = 0
    end: Natural | None = None


class Reserve(Struct, array_like=True, frozen=True, tag="reserve"):
    pool: Name
    seq: Natural
    namespace: Canonical
    tokens: bytes
    headroom: Natural = 0
    last_page: str = "copy"
    wait_s: Wait = 0.0
    prefill_tokens_per_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """How fast the worker computes prompts; 0: it does not say. What is slower to load than that is not loaded."""
    retain: list[Retain] = []
    """How firmly what is cached of the sequence is kept. In order, without overlaps; forks have the same."""
    join_s: Wait = 0.0
    """So long it may wait for another worker that is computing what this one would compute; 0: it does not."""
    early: bool = False
    """Do not wait until what the host tier has is on the device: the answer says which pages are still loading."""


class Step(Struct, array_like=True, frozen=True, tag="step"):
    """A batch: copied, free, truncate, commit, extend, share, in this order; each item succeeds or fails alone.

    ``copied`` names sequences whose copy_rows have been carried out. Items may name sequences of any pool.
    """

    free: list[Free] = []
    truncate: list[Truncate] = []
    commit: list[Commit] = []
    extend: list[Extend] = []
    share: list[Share] = []
    copied: list[Natural] = []


class Handoff(Struct, array_like=True, frozen=True, tag="handoff"):
    """Put a sequence in transit under a ticket (16 random bytes of the client's) for at most ttl_s."""

    seq: Natural
    ticket: Ticket
    ttl_s: Wait


class Adopt(Struct, array_like=True, frozen=True, tag="adopt"):
    pool: Name
    ticket: Ticket
    seq: Natural


class Compact(Struct, array_like=True, frozen=True, tag="compact"):
    """Swap the sequence's shadow pages for the canonical ones; the shadows go back at once."""

    seq: Natural


class Invalidate(Struct, array_like=True, frozen=True, tag="invalidate"):
    pool: Name
    namespace: Canonical


class Lookup(Struct, array_like=True, frozen=True, tag="lookup"):
    pool: Name
    namespace: Canonical
    prompts: list[bytes]


class Prefetch(Struct, array_like=True, frozen=True, tag="prefetch"):
    """Bring what the host tier has of a prompt to the device. Answered, when it is there, like a lookup of it."""

    pool: Name
    namespace: Canonical
    tokens: bytes


class WaitLoaded(Struct, array_like=True, frozen=True, tag="wait_loaded"):
    """Answered when all pages of the sequence are there, or with ``layer`` when this layer of all of them is."""

    seq: Natural
    layer: Natural | None = None


class Cancel(Struct, array_like=True, frozen=True, tag="cancel"):
    """Take the queued request with this id out of the queue; it is answered with ``timeout``."""

    request: Natural


class Heartbeat(Struct, array_like=True, frozen=True, tag="heartbeat"):
    pass


class Bye(Struct, array_like=True, frozen=True, tag="bye"):
    """End the session; the sender no longer touches the arena."""


class Stats(Struct, array_like=True, frozen=True, tag="stats"):
    pass


class Claim(Struct, array_like=True, frozen=True):
    """A sequence that goes on with the next daemon, as its worker knows it.

    ``page_table``: packed page ids; ``generations``: packed uint64, one a page, as they were when the worker got the
    pages; ``copy_rows``: those that have not been carried out yet.
    """

    pool: Name
    seq: Natural
    namespace: Canonical
    tokens: bytes
    page_table: bytes
    generations: bytes
    committed: Natural
    cached: Natural
    copy_rows: list[CopyRow] = []


class Resume(Struct, array_like=True, frozen=True, tag="resume"):
    """After a rejoin: the session's sequences. ``last``: there are no more, and what is not claimed is free."""

    claims: list[Claim]
    last: bool = True


class Shutdown(Struct, array_like=True, frozen=True, tag="shutdown"):
    """End the daemon in good order. Under a keeper the next one goes on with everything that is there."""


Body = (
    Reserve | Step | Handoff | Adopt | Compact | Invalidate | Lookup | Cancel | Heartbeat | Bye | Stats | Resume
    | Shutdown | Prefetch | WaitLoaded
)  # fmt: skip
READ_ONLY = (Lookup, Stats)
"""Commands that need no session: they change nothing and hold nothing."""


class Request(Struct, array_like=True, frozen=True):
    """One command of a worker with its envelope.

    ``id`` increases within a session; a repeat of one of the last 64 gets the same answer and changes nothing.
    ``deadline`` is CLOCK_MONOTONIC of the machine; a request handled later is refused and not executed.
    """

    session: Natural
    epoch: Natural
    id: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    deadline: float
    body: Body


# -- what the daemon tells its core -------------------------------------------------------------------------------


class OpenSession(Struct, frozen=True):
    """A worker has authenticated on the attach socket. ``token`` is 16 random bytes made by the edge."""

    session: int
    token: bytes
    name: str


class RejoinSession(Struct, frozen=True):
    """A worker of an earlier daemon's time is back, with the token of its session. It gets a new epoch."""

    session: int
    token: bytes


class JoinSession(Struct, frozen=True):
    """A further process of a session is there (again, after a restart), with the token of its session."""

    session: int
    token: bytes
    rank: int


class EndSession(Struct, frozen=True):
    """A worker is gone. Its private pages are quarantined while ``mapped``: it could still write to them."""

    session: int
    mapped: bool
    reason: str


class MappingGone(Struct, frozen=True):
    """Nothing of an ended session maps the arena any longer: its quarantined pages may be used again."""

    session: int


class LosePool(Struct, frozen=True):
    """An error has killed a CUDA context: what this pool's device holds is not to be believed any more."""

    pool: str


class CopyDone(Struct, frozen=True):
    """A copy has ended. Not ``ok``: its targets hold anything. ``seconds``: how long it ran, once it was its turn."""

    copy: int
    ok: bool
    seconds: float = 0.0


class CopyProgress(Struct, frozen=True):
    """The first ``layers`` layers of all pages of a copy are there."""

    copy: int
    layers: int


class Tick(Struct, frozen=True):
    """Time has passed; ``running_s`` is the daemon's running time, which stands still while the daemon does."""

    running_s: float


class Drain(Struct, frozen=True):
    """Take nothing new; let what runs come to its end."""


Command = (
    Request | OpenSession | RejoinSession | JoinSession | EndSession | MappingGone | LosePool | CopyDone | CopyProgress
    | Tick | Drain
)  # fmt: skip


# -- what comes back to a worker ----------------------------------------------------------------------------------


class Failure(Struct, array_like=True, frozen=True, tag="error"):
    code: str
    message: str
    details: dict[str, int | float | str | bool] = {}


def failure(error: RadixKVError) -> Failure:
    return Failure(error.code, error.message, error.details)


Range = tuple[int, int]
"""(first, count) of entries of a page table."""
NO_RANGE: Range = (0, 0)


class Reserved(Struct, array_like=True, frozen=True, tag="reserved"):
    """``loading``: entries of the page table that are still being loaded from the host tier: nobody may read them yet.

    Only who asked for it (``early``) is answered before all are there.
    """

    page_table: bytes
    cached_tokens: int
    writable_from_tokens: int
    copy_rows: list[CopyRow] = []
    loading: Range = NO_RANGE


class Loaded(Struct, array_like=True, frozen=True, tag="loaded"):
    """The first ``layers`` layers of all pages of the sequence are there; ``loading``: pages that lack later ones."""

    layers: int
    loading: Range = NO_RANGE


class Truncated(Struct, array_like=True, frozen=True, tag="truncated"):
    """``tail``: the id that replaces the last kept page (its rows come by copy_rows), or nothing."""

    kept_pages: int
    tail: bytes = b""
    copy_rows: list[CopyRow] = []


class Shared(Struct, array_like=True, frozen=True, tag="shared"):
    """Children share the parent's first ``shared_pages`` pages; ``tails``: an own page a child, if at is inside one."""

    at: int
    shared_pages: int
    tails: bytes = b""
    copy_rows: list[CopyRow] = []


class Stepped(Struct, array_like=True, frozen=True, tag="stepped"):
    """One result an item, in the order of the items. ``extend`` gives the appended page ids, packed."""

    free: list[Failure | None] = []
    truncate: list[Truncated | Failure] = []
    commit: list[Failure | None] = []
    extend: list[bytes | Failure] = []
    share: list[Shared | Failure] = []
    copied: list[Failure | None] = []


class Adopted(Struct, array_like=True, frozen=True, tag="adopted"):
    """``namespace``: in which it was reserved, for a later claim."""

    tokens: bytes
    page_table: bytes
    committed_tokens: int
    cached_tokens: int
    writable_from_tokens: int
    copy_rows: list[CopyRow] = []
    namespace: bytes = b""


class Compacted(Struct, array_like=True, frozen=True, tag="compacted"):
    page_table: bytes


class Invalidated(Struct, array_like=True, frozen=True, tag="invalidated"):
    epoch: int


class LookedUp(Struct, array_like=True, frozen=True, tag="found"):
    device_tokens: list[int]
    host_tokens: list[int]


class Kept(Struct, array_like=True, frozen=True, tag="kept"):
    """A claimed sequence goes on with its page table. Both numbers may be larger than its worker knew."""

    committed_tokens: int
    writable_from_tokens: int


class Resumed(Struct, array_like=True, frozen=True, tag="resumed"):
    """One result a claim, in order. A claim that cannot be proven fails with ``session_lost``."""

    results: list[Kept | Failure]


class Done(Struct, array_like=True, frozen=True, tag="done"):
    pass


class Statistics(Struct, array_like=True, frozen=True, tag="statistics"):
    snapshot: dict[str, Any]


Reply = (
    Failure | Reserved | Stepped | Adopted | Compacted | Invalidated | LookedUp | Done | Statistics | Resumed | Loaded
)  # fmt: skip


# -- the attach socket: who is there, and the way by which memory is handed over ----------------------------------

PROTOCOL_VERSION = 1


class Hello(Struct, array_like=True, frozen=True, tag="hello"):
    version: int
    name: str = ""


class MapPool(Struct, array_like=True, frozen=True, tag="map"):
    """The answer comes with two file descriptors: the pool's arena, then its descriptor table."""

    pool: Name


class Rejoin(Struct, array_like=True, frozen=True, tag="rejoin"):
    """Go on with a session of an earlier daemon's time (or on a new connection). Answered like hello, with a new epoch.

    ``rank``: 0, or which of the session's further processes this is.
    """

    version: int
    session: Natural
    token: Ticket
    rank: Natural = 0


class Join(Struct, array_like=True, frozen=True, tag="join"):
    """A further process of a session, which only maps: its end ends the session."""

    version: int
    session: Natural
    token: Ticket
    rank: Natural


AttachRequest = Hello | MapPool | Rejoin | Join


class Welcome(Struct, array_like=True, frozen=True, tag="welcome"):
    """``slot``: where in every pool's descriptor table this session's record is."""

    version: int
    session: int
    epoch: int
    slot: int
    token: bytes
    boot_id: str
    cache_id: str
    pools: list[str]
    heartbeat_s: float
    lease_s: float
    message_bytes: int = 0
    """``limits.message_bytes``, so that a worker need not send what would be refused; 0: not told."""
    resumes: bool = False
    """True: should this daemon die, the next one may know the session: come back by rejoin before giving it up."""


class PoolMap(Struct, array_like=True, frozen=True, tag="pool"):
    name: str
    pages: int
    arena_bytes: int
    table_bytes: int
    spec: dict[str, Any]
    layout: dict[str, Any]
    ranks: int = 1
    """How many arenas like this one the pool has, one a rank."""
    host_pages: int = 0
    """How many pages its host tier holds; 0: it has none, and nobody waits for copies."""
    device: str = ""
    """UUID of the CUDA device that this rank's arena is on; empty: the machine's memory, and its descriptor a memfd."""


AttachReply = Welcome | PoolMap | Failure


# -- what the core tells the edges --------------------------------------------------------------------------------
# Descriptor writes must be stored before the reply leaves. Each names pages by packed int32 ids.


class Assign(Struct, frozen=True):
    """Pages leave the free list, or the tree and its order of eviction at once: generation + 1, private, owned."""

    pool: str
    pages: bytes
    owner: int
    namespace: int
    epoch: int


class Publish(Struct, frozen=True):
    """Pages are complete and immutable, each continues the one before it.

    ``parent_page``: the page before the first of them (-1: none).
    """

    pool: str
    pages: bytes
    shadow: bool
    tokens: bytes
    parent_page: int = -1


class Retire(Struct, frozen=True):
    """Pages go back to the free list, or, where someone may still write to them, into quarantine.

    Pages of the host tier are named by their places in the table: behind those of the device.
    """

    pool: str
    pages: bytes
    quarantined: bool = False


class Stamp(Struct, frozen=True):
    """The last holder let go of the runs of cached pages that end with these: their place in the order of eviction.

    A page's stamp is the latest of its own and of those of all pages that continue it. Pages by their places, too.
    """

    pool: str
    pages: bytes
    stamp: int


class Copied(Struct, frozen=True):
    """Targets have the content of sources in the other tier, each the one's at its place in the list: immutable,
    in the tree, with all that the table says of them but owner and generation. Pages by their places in the table."""

    pool: str
    sources: bytes
    targets: bytes


class Own(Struct, frozen=True):
    """Private and shadow pages change their owner (0: in transit)."""

    pool: str
    pages: bytes
    owner: int


class NamespaceRecord(Struct, frozen=True):
    pool: str
    namespace: int
    epoch: int
    canonical: bytes
    invalidations: int = 0


class SessionRecord(Struct, frozen=True):
    """In every pool's table: a session opens (its token) or is over (epoch 0)."""

    slot: int
    session: int
    epoch: int
    token: bytes


Write = Assign | Publish | Copied | Retire | Stamp | Own | NamespaceRecord | SessionRecord


class Copy(Struct, frozen=True):
    """Effect: copy whole pages between tiers; its end comes back as ``CopyDone``.

    ``sources``, ``targets``: packed int32 page ids, source i goes to target i. ``by_layer``: the first layer of all
    pages before the second of any, and ``CopyProgress`` says how far it is.
    """

    copy: int
    pool: str
    sources: bytes
    targets: bytes
    to_host: bool
    by_layer: bool = False


class Granted(Struct, frozen=True):
    """The late answer to a request that had been queued."""

    session: int
    request: int
    reply: Reply


class Outcome(Struct):
    """All that one command leads to. ``reply`` is None when the request waits in a queue or asked for none."""

    reply: Reply | None = None
    writes: list[Write] = []
    granted: Sequence[Granted] = ()
    effects: Sequence[Copy] = ()
    ended: Sequence[int] = ()
    """Sessions whose end this command brought about (by the core's own judgement: lapsed and revoked)."""
