"""What is copied between device and host tier, when, and what follows when a copy has ended.

A reserve that finds part of its prompt in the host tier waits until that is on the device; one that would push pages
out that are on the device alone waits until the host tier has them. It holds nothing of its own meanwhile, is planned
anew after every copy that ends, and goes without after ``ROUNDS`` rounds or ``PATIENCE_S``: then cold pages are dropped
and what is in the host tier is computed again. ``Extend`` and all others never wait: they drop.

A reserve may also be granted while its pages are being loaded (``early.py``). A load that such readers wait for is
begun again when it fails, under another number, at most ``ROUNDS`` times within ``PATIENCE_S``.

So that reserves seldom have to wait, a reclaimer copies the coldest pages ahead of need (``reclaim``).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import Enum

from radixkv.allocator.page_states import ABANDON, CACHED, FREE, LOADED, LOADING, SAVE, SAVED, SAVING
from radixkv.commands import COPY_WAIT_S, Copied, Copy, CopyDone, CopyProgress, Retire, Stamp
from radixkv.engine import early
from radixkv.engine.host import Copying, CopyRun, HostTier
from radixkv.engine.pool import LAST_ID, Pool
from radixkv.evictor.tiering import worth_loading
from radixkv.tree.node import Node, Root
from radixkv.tree.walk import Match

ROUNDS = 8
PATIENCE_S = COPY_WAIT_S
BATCH_BYTES = 64 * 2**20
"""What the reclaimer copies at once: some 20 ms, for whoever has to wait for his own copies behind it."""
_NEW = 0.3
"""What the latest load counts for in the measured speed."""
REST_S = 1.0
"""After a failed copy, before another is begun."""

Victim = tuple[Node, int]
"""A run, and how many of its last pages."""


class First(Enum):
    """What comes before a reserve is carried out."""

    NOTHING = "nothing"
    COPIES = "copies"
    A_NEW_PLAN = "a new plan"
    """Nothing is copied, but runs of the tree have been split or have left."""


class Tiering:
    """Begins and ends the copies of one pool. ``effects``: where they leave by; ``ids`` numbers them."""

    def __init__(self, pool: Pool, host: HostTier, effects: list[Copy], ids: Iterator[int]) -> None:
        self.pool = pool
        self.host = host
        self._effects = effects
        self._ids = ids
        spec = pool.config.spec
        self._batch_pages = max(1, BATCH_BYTES // (spec.page_bytes * pool.config.ranks))
        self.again: list[Copying] = []
        """Loads to be begun again when they are due."""
        self.load_bytes_per_s = 0.0
        """As measured, the later loads counting for more; 0: none yet."""

    # -- what a reserve needs -------------------------------------------------------------------------------------

    def worth(self, below: Match, prefill_tokens_per_s: float) -> Match:
        """What was matched in the host tier if it pays to load it, else nothing."""
        config, pages = self.pool.config, below.pages
        if not pages or worth_loading(
            pages * self.pool.page_size,
            pages * config.spec.page_bytes * config.ranks,
            self.load_bytes_per_s,
            prefill_tokens_per_s,
            config.host_load_min_tokens,
        ):
            return below
        return Match(below.node, 0, None, 0, [])

    def fetch(self, match: Match, below: Match, need: int, by_layer: bool = False) -> First:
        """Begin the copies that come before ``need`` device pages are taken for a prompt.

        ``match``, ``below``: what there is of it on the device, and behind that in the host tier alone; the latter's
        pages are part of ``need``.
        """
        if any(node.holders for node in early.matched(below)):
            return First.COPIES  # somebody else's copy holds it: it comes, or this one's turn does
        short = need - self.pool.pages.counts[FREE]
        if not below.pages and (short <= 0 or not _dirty(self._coldest(short, match))):
            return First.NOTHING
        guard = self._hold(below if below.pages else match)
        victims = self._coldest(short)  # anew: not from the path that is held now
        if _dirty(victims) and self._save(victims, below.pages, guard):
            return First.COPIES
        if below.pages:
            self._load(guard, below.pages, by_layer)
            return First.COPIES
        self._let_go([guard])
        return First.A_NEW_PLAN

    def _hold(self, match: Match) -> Node:
        """Hold a path from the root, for a copy. Returns its end."""
        end, woken = self.pool.tree.pin(match)
        self.pool.woken(woken)
        if match.inside is not None:
            self._stamp([end])  # the new end of a run whose stamp was written behind it
        return end

    def _coldest(self, count: int, held: Match | None = None) -> list[Victim]:
        """The runs that would leave the device next for ``count`` pages, were the path ``held`` held."""
        own = set() if held is None else set(self.pool.tree.path(held.node))
        found = []
        for node in self.pool.order if count > 0 else ():
            pages = node.page_count
            if held is not None and node is held.inside:
                pages -= held.inside_pages
            if node not in own:
                found.append((node, min(count, pages)))
                count -= pages
            if count <= 0:
                break
        return found

    # -- ahead of need --------------------------------------------------------------------------------------------

    def reclaim(self, now: float) -> None:
        """If free pages have run low, copy what is not copied yet of the pages that would leave the device next."""
        pool, host = self.pool, self.host
        high = min(pool.config.reclaim_pages, host.limit)
        free = pool.pages.counts[FREE]
        if host.taken * 2 < high or free * 2 >= high or pool.frozen or now < host.rests_until:
            return
        if any(copying.to_host for copying in host.copies.values()):
            return
        victims = self._coldest(high - free)
        dirty = _dirty(victims)
        if dirty <= self._batch_pages:
            host.taken = 0  # else the rest follows when these have been copied
        targets = host.take(min(dirty, self._batch_pages))
        left, some = len(targets), []  # nothing is dropped for what might be needed: the hottest are left out
        for node, count in victims:
            if left and not node.host:
                some.append((node, min(count, left)))
                left -= some[-1][1]
        self._copy_out(some, targets, None)

    def write_through(self, now: float) -> None:
        """Copy what has been committed since the last time, if the configuration wants it in both tiers at once."""
        host = self.host
        if not host.fresh or self.pool.frozen or now < host.rests_until:
            return
        if any(copying.to_host for copying in host.copies.values()):
            return
        states = self.pool.pages.states
        fresh = [
            (node, node.page_count)
            for node in host.fresh
            if node.parent is not None and node.pages and not node.host and not _root(node).retired
            and all(states[page] == CACHED for page in array("i", bytes(node.pages)))
        ]  # fmt: skip
        host.fresh.clear()
        room = host.take(_dirty(fresh))
        some: list[Victim] = []
        for node, pages in fresh:
            if pages <= len(room) - _dirty(some):
                some.append((node, pages))
        host.pages.give(room[_dirty(some) :], LOADING, ABANDON)
        self._copy_out(some, room[: _dirty(some)], None)

    # -- copies begin ---------------------------------------------------------------------------------------------

    def _save(self, victims: list[Victim], leaving: int, guard: Node) -> bool:
        """Copy those of the victims that the host tier does not have; what it has no room for is dropped, the coldest
        first. ``leaving``: pages of the host tier that are to be loaded next. False: there was room for none.
        """
        count = sum(pages for _, pages in victims)
        self._push_out(victims, count - self.host.room(count, leaving))
        coming = sum(pages for node, pages in victims if node.host)
        targets = self.host.take(_dirty(victims), leaving - coming)
        # Counted again: for lack of other room copies of theirs may just have been dropped.
        while (short := _dirty(victims) - len(targets)) > 0:
            self._push_out(victims, short)
        return self._copy_out([(node, pages) for node, pages in victims if not node.host], targets, guard)

    def _push_out(self, victims: list[Victim], surplus: int) -> None:
        """Take ``surplus`` pages of the victims off the device, the coldest first; forget them in the list."""
        while surplus > 0:
            node, count = victims.pop(0)
            gone = min(count, surplus)
            surplus -= gone
            if gone < count:
                victims.insert(0, (node, count - gone))
            self.pool.push_out(node, gone)

    def _copy_out(self, dirty: list[Victim], targets: array[int], guard: Node | None) -> bool:
        """Copy the last pages of these idle runs to as many ``targets``. False: there are none."""
        tails = [self._tail(node, count) for node, count in dirty]  # cut before any is held
        runs, at = [], 0
        for node in tails:
            self.pool.woken(self.pool.tree.hold(node))
            device = array("i", bytes(node.pages))
            self.pool.pages.move(device, CACHED, SAVE)
            runs.append(CopyRun(node, device, targets[at : at + len(device)]))
            at += len(device)
        self.host.saving_pages += at
        if runs:
            self._begin(Copying(next(self._ids), True, runs, guard))
        return bool(runs)

    def _tail(self, node: Node, count: int) -> Node:
        if count == node.page_count:
            return node
        tail = self.pool.tree.cut(node, node.page_count - count)
        self.pool.order.add(tail)
        return tail

    def _load(self, end: Node, count: int, by_layer: bool) -> None:
        """Copy the last ``count`` pages of a held path to the device. There are as many device pages to be had."""
        parts, node = [], end
        while not node.pages and node.parent is not None:
            parts.append(bytes(node.host))
            node = node.parent
        sources = array("i", b"".join(reversed(parts)))
        self.host.leaving_pages += count
        device = self.pool.take_to_fill(count, _root(end))
        self.host.pages.move(sources, CACHED, SAVE)
        self._begin(Copying(next(self._ids), False, [CopyRun(end, device, sources)], by_layer=by_layer))

    def _begin(self, copying: Copying) -> None:
        self.host.copies[copying.id] = copying
        self._ask(copying)

    def _ask(self, copying: Copying) -> None:
        device = b"".join(run.device.tobytes() for run in copying.runs)
        host = b"".join(run.host.tobytes() for run in copying.runs)
        sources, targets = (device, host) if copying.to_host else (host, device)
        self._effects.append(Copy(copying.id, self.pool.name, sources, targets, copying.to_host, copying.by_layer))

    def begin_again(self, now: float) -> None:
        """What is due. The process that failed is gone: nobody but the next one writes to the same targets."""
        for copying in [one for one in self.again if one.due <= now]:
            self.again.remove(copying)
            if self.host.copies.get(copying.id) is copying:
                self._ask(copying)

    # -- copies end -----------------------------------------------------------------------------------------------

    def done(self, copying: Copying, outcome: CopyDone, now: float) -> None:
        """A copy is known to have ended: nothing reads or writes for it any more."""
        ok = outcome.ok
        host, counters = self.host, self.pool.counters
        del host.copies[copying.id]
        if not ok:
            counters["failed_copies"] += 1
            host.rests_until = now + REST_S
            if copying.readers and self._is_begun_again(copying, now):
                return
        for run in copying.runs:
            if copying.to_host:
                self._saved(run, ok)
            else:
                self._loaded(run, ok, copying)
        if ok and not copying.to_host and outcome.seconds > 0:
            config = self.pool.config
            speed = copying.pages * config.spec.page_bytes * config.ranks / outcome.seconds
            self.load_bytes_per_s += (speed - self.load_bytes_per_s) * (_NEW if self.load_bytes_per_s else 1.0)
        if ok:
            counters["saved_pages" if copying.to_host else "loaded_pages"] += copying.pages
        self._let_go(copying.ends)
        self.pool.gained = True
        self.pool.copied = bool(self.pool.fetching)

    def _is_begun_again(self, copying: Copying, now: float) -> bool:
        """The same once more, under another number: at once, or after a rest if it has failed before."""
        if copying.tries == 1:
            copying.since = copying.due = now
        elif copying.tries < ROUNDS and now < copying.since + PATIENCE_S:
            copying.due = now + REST_S
        else:
            return False
        copying.tries += 1
        copying.id = next(self._ids)
        self.host.copies[copying.id] = copying
        self.again.append(copying)
        return True

    def progress(self, copying: Copying, outcome: CopyProgress) -> None:
        """So many layers are there; that they were once is still so when the load is begun again."""
        copying.layers = max(copying.layers, min(outcome.layers, self.pool.config.spec.layers))
        self.pool.arriving.news = True

    def _saved(self, run: CopyRun, ok: bool) -> None:
        host = self.host
        self.pool.pages.move(run.device, SAVING, SAVED)
        host.saving_pages -= len(run.host)
        if not ok:
            host.pages.give(run.host, LOADING, ABANDON)
            return
        host.pages.move(run.host, LOADING, LOADED)
        self.pool.writes.append(Copied(self.pool.name, run.device.tobytes(), host.places(run.host)))
        packed = run.host
        for node in run.spanned():
            here, packed = packed[-node.page_count :], packed[: -node.page_count]
            host.cover(node, here.tobytes())

    def _loaded(self, run: CopyRun, ok: bool, copying: Copying) -> None:
        """Runs that somebody has computed meanwhile are on the device already, in other pages."""
        host, pool = self.host, self.pool
        host.pages.move(run.host, SAVING, SAVED)
        host.leaving_pages -= len(run.host)
        packed, unused = run.device, array("i")
        placed = []
        for node in run.spanned():
            here, packed = packed[-node.page_count :], packed[: -node.page_count]
            if ok and not node.pages:
                placed.append((node, here))
            else:
                unused += early.shade(pool, node, here, copying) if ok and copying.readers else here
        for node, pages in reversed(placed):
            self._surface(node, pages)
        if copying.readers:
            if ok:
                early.arrived(copying)
            else:
                early.lose(pool, copying)
            pool.arriving.news = True
        if unused:
            pool.writes.append(Retire(pool.name, pool.pages.give(unused, LOADING, ABANDON)))

    def _surface(self, node: Node, pages: array[int]) -> None:
        packed = pages.tobytes()
        self.pool.pages.move(pages, LOADING, LOADED)
        self.host.surface(node, packed)
        self.pool.writes.append(Copied(self.pool.name, self.host.places(node.host), packed))

    def _let_go(self, ends: list[Node]) -> None:
        """A copy, or who waited for one, holds these paths no longer. What falls idle goes back to where it was."""
        pool, host = self.pool, self.host
        idle: list[Node] = []
        for end in ends:
            retired = _root(end).retired
            for node in pool.tree.release(end):
                idle.append(node)
                if not node.pages:
                    host.order.add(node)
                else:
                    pool.order.add(node)
                    if node.host and node not in host.clean:  # the head of a run that was split meanwhile
                        host.cover(node, bytes(node.host))
                if retired:
                    pool.retired.append((node, None))
        self._stamp(idle)
        host.trim()

    def _stamp(self, nodes: list[Node]) -> None:
        """Write their places in the order of eviction to their ends."""
        stamped: dict[int, list[bytes]] = {}
        for node in nodes:
            end = bytes(node.pages[LAST_ID]) if node.pages else self.host.end(node)
            stamped.setdefault(node.stamp, []).append(end)
        for stamp, ends in stamped.items():
            if stamp:
                self.pool.writes.append(Stamp(self.pool.name, b"".join(ends), stamp))


def _dirty(victims: list[Victim]) -> int:
    """How many of these pages are on the device alone."""
    return sum(pages for node, pages in victims if not node.host)


def _root(node: Node) -> Root:
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node
