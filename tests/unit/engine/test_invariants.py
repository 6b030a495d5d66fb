"""Each check of the recount is broken on purpose, and must be caught by its name.

One engine with something of everything, or one with a host tier, is damaged in one place a case. The last test reads
the checks themselves: one that no case breaks is not tested.
"""

import ast
from pathlib import Path

import pytest

from fuzz.model.packing import pack_pages
from fuzz.pairs.tiered import Tiered
from fuzz.pairs.watched import Watched
from fuzz.pairs.worker import Held, Worker, small_config, small_pair
from radixkv import commands
from radixkv.allocator.page_states import State
from radixkv.engine import invariants
from radixkv.errors import BrokenInvariant
from radixkv.sessions.window import SPAN
from radixkv.tree.node import Node, Root

A, B, C, D = ([token] * 4 for token in (1, 2, 3, 4))


class World:
    """Two live workers and a dead one; held, shared, idle, shadow, quarantined, moving and waiting things.

    ``first`` holds A B C and a private tail, ``child`` copies rows from that tail; ``twin`` has two shadows, since
    ``first``'s worker computed the same before; ``moving`` is in transit; A B D and D C are idle.
    """

    def __init__(self):
        self.pair = small_pair(48, session_floor_pages=1)
        one, two, dead = Worker(self.pair), Worker(self.pair), Worker(self.pair)
        dead.reserve([9] * 4)
        self.pair.do(commands.EndSession(dead.session, mapped=True, reason="killed"))
        rivals = [one.reserve([*A, *D]), two.reserve([*A, *D])]
        one.commit(rivals[0], 8)
        two.commit(rivals[1], 8)
        one.free(rivals[0])
        one.cache([*A, *B, *D])
        one.cache([*D, *C])
        first = one.compute([*A, *B, *C, 7, 7])
        child = one.fork(first)[0]
        moving = two.compute([*B, *B, 5])
        two.ask(commands.Handoff(moving.seq, b"t" * 16, 100.0))
        two.try_reserve(range(4 * 40), wait_s=50.0)
        self.engine = self.pair.real
        self.pool = self.engine.pools["a"]
        self.states = self.pool.pages.states
        self.session = self.engine.sessions.find(one.session, 1)
        self.first = self.session.sequences[first.seq]
        self.child = self.session.sequences[child.seq]
        self.other = self.engine.sessions.find(two.session, 1)
        self.twin = self.other.sequences[rivals[1].seq]
        self.moving = self.engine.transit.sequences()[0]
        self.dead = dead.session
        self.root = self.first.root
        self.idle = self.node(D)

    def node(self, *way) -> Node:
        """The node whose first page has the last of these tokens, below those before."""
        node = self.root
        for tokens in way:
            node = node.children[b"".join(token.to_bytes(4, "little") for token in tokens)]
        return node

    def leave(self, page):
        """A sequence loses a page, the pool does not get it."""
        self.states[page] = State.FREE


class Tiers:
    """Two tiers: A B is being loaded, C D on both, B B in the host tier; of D D the second page is being saved."""

    def __init__(self):
        self.pair = Tiered(small_config(14, host_pages=8, reclaim_pages=0))
        worker = Worker(self.pair)
        for prompt in ([*A, *B], [*B, *B], [*C, *D], [*D, *D]):
            worker.cache(prompt)
        assert worker.try_reserve([9] * 4 * 12) is None  # six pages are free: the first six have to leave
        self.pair.finish()
        worker.free(Held(worker.next_seq - 1, worker.pair.late(worker.session)))
        assert worker.try_reserve([*C, *D], last_page="keep") is None
        self.pair.finish()
        worker.free(Held(worker.next_seq - 1, worker.pair.late(worker.session)))
        assert worker.try_reserve([*A, *B]) is None
        assert worker.try_reserve([9] * 4 * 9) is None
        self.engine = self.pair.real
        self.pool = self.engine.pools["a"]
        self.host = self.pool.host
        self.load, self.save = self.host.copies.values()
        self.loaded, self.saved = self.load.runs[0].node, self.save.runs[0].node
        (self.clean,) = self.host.clean
        (self.below,) = self.host.order


class Early:
    """Session 1 computes A; of session 2's D C the first page is on the device and the second one being loaded."""

    def __init__(self):
        self.pair = pair = Tiered(small_config(8, host_pages=8, reclaim_pages=0))
        worker, other = Worker(pair), Worker(pair)
        worker.cache([*D, *C])
        worker.cache(A)
        worker.reserve([*D, 9])  # holds D
        assert worker.try_reserve([9] * 4 * 5) is None  # four pages are free: C has to leave
        pair.finish()
        worker.free(Held(worker.next_seq - 1, pair.late(worker.session)))
        other.reserve([*D, *C, 9], early=True)
        self.engine = pair.real
        self.pool = self.engine.pools["a"]
        self.seq = pair.sequences(2)[1]
        (self.load,) = self.pool.host.copies.values()
        assert self.seq.loading == range(1, 2)


class Flying:
    """Session 1 computes A, session 2 B; 2 waits for 1's A, and 3 for 2's B."""

    def __init__(self):
        pair = Watched()
        one, two, three = Worker(pair), Worker(pair), Worker(pair)
        one.reserve(A)
        two.reserve(B)
        assert two.try_reserve([*A, 9], join_s=9.0) is three.try_reserve([*B, 9], join_s=9.0) is None
        self.engine = pair.engine
        self.pool = self.engine.pools["a"]
        self.flights = self.pool.flights
        self.first, self.second = self.flights.starts


class Bounded:
    """Namespaces with caps; one page is cached."""

    def __init__(self):
        pair = Watched(8, namespace_cap_pages=4)
        Worker(pair).cache(A)
        self.engine = pair.engine
        self.pool = self.engine.pools["a"]
        self.shares = self.pool.shares


CASES = []


def breaks(name, message, world=World):
    """The decorated damage must be caught as ``name``, by the check with this in its message."""

    def register(damage):
        CASES.append(pytest.param(world, damage, name, message, id=damage.__name__))
        return damage

    return register


# -- pages ---------------------------------------------------------------------------------------------------------


@breaks("I1", "do not add up to")
def counts_do_not_add_up(world):
    world.pool.pages.counts[State.FREE] += 1


@breaks("I1", " counted, ")
def one_state_counts_for_another(world):
    world.pool.pages.counts[State.FREE] += 1
    world.pool.pages.counts[State.CACHED] -= 1


@breaks("I3", "twice in the free list")
def a_page_is_given_back_twice(world):
    world.pool.pages.free.give(pack_pages(world.pool.pages.free.ids()[:1]))


@breaks("I1", "page is in two places")
def a_page_is_quarantined_twice(world):
    pages = world.engine.quarantine[world.dead]["a"]
    pages.append(pages[0])


@breaks("I1", "have their place")
def a_quarantined_page_is_forgotten(world):
    world.engine.quarantine[world.dead]["a"].clear()


@breaks("I1", "but kept as such")
def a_cached_page_believes_to_be_free(world):
    world.states[int.from_bytes(world.idle.pages[:4], "little")] = State.FREE


# -- holders -------------------------------------------------------------------------------------------------------


@breaks("I2", "pins another path than it believes")
def a_path_is_shorter_than_believed(world):
    world.first.depth += 1


@breaks("I2", "pins a path of another namespace")
def a_sequence_changes_its_namespace(world):
    world.twin.root = Root(0, 99)


@breaks("I2", "hold it")
def a_node_counts_a_holder_too_many(world):
    world.node(A).holders += 1


@breaks("I2", "extra holders")
def a_private_page_counts_a_holder_too_many(world):
    world.pool.pages.hold(world.first.pages[-1])


@breaks("I2", "who copies from a private page is not known")
def a_copier_is_forgotten(world):
    world.pool.copying.clear()


@breaks("I2", "pins more than it has")
def a_path_goes_on_behind_the_table(world):
    world.first.depth = world.first.published + 1


@breaks("I2", "shares more than it has")
def a_sequence_shares_more_than_its_table(world):
    world.first.shared = len(world.first.pages) + 1


@breaks("I2", "does not know its shadows")
def shadows_are_forgotten(world):
    world.twin.shadows = frozenset()


@breaks("I2", "cached pages are not on its path")
def a_path_is_lost(world):
    world.first.node, world.first.depth = world.root, 0


# -- the tree ------------------------------------------------------------------------------------------------------


@breaks("I9", "does not know its parent")
def a_child_points_elsewhere(world):
    world.idle.parent = world.node(A)


@breaks("I9", "more nodes than there are pages")
def the_tree_bites_its_tail(world):
    world.idle.children = {b"loop": world.idle}
    world.idle.parent = world.idle


@breaks("I9", "a node without pages")
def a_node_is_empty(world):
    world.idle.tokens = world.idle.pages = b""


@breaks("I9", "tokens and pages differ")
def a_node_lacks_a_pages_tokens(world):
    world.idle.tokens = world.idle.tokens[:-16]


@breaks("I9", "filed under another key")
def a_child_is_filed_wrongly(world):
    key = bytes(world.idle.tokens[:16])
    world.root.children[b"x" * 16] = world.root.children.pop(key)


@breaks("I9", "empty dict of children")
def a_leaf_has_an_empty_dict(world):
    world.idle.children = {}


@breaks("I9", "a root is no node")
def a_root_is_held(world):
    world.root.holders = 1


@breaks("I7", "held more often than its ancestor")
def a_child_is_held_more_than_its_parent(world):
    world.first.node.holders += 5


@breaks("I5", "visible without being complete")
def a_private_page_is_in_the_tree(world):
    world.states[int.from_bytes(world.idle.pages[:4], "little")] = State.PRIVATE


# -- the order of eviction ------------------------------------------------------------------------------------------


@breaks("I7", "are in the order of eviction")
def an_idle_node_is_not_in_the_order(world):
    world.pool.order.remove(world.idle)


@breaks("I7", "evicted before its child")
def a_parent_goes_before_its_child(world):
    lower = world.node(A, B, D)
    lower.holders = world.node(A, B).holders = 0
    world.pool.order.remove(lower)
    world.pool.order.add(world.node(A, B))
    world.pool.order.add(lower)


@breaks("I7", "not that of the releases")
def the_order_is_not_that_of_the_releases(world):
    first, *_, last = world.pool.order
    first.stamp = last.stamp + 1


@breaks("I27", "a stamp from the future")
def a_stamp_is_still_to_come(world):
    list(world.pool.order)[-1].stamp = world.pool.stamp + 1


# -- page tables ---------------------------------------------------------------------------------------------------


@breaks("I12", "tokens do not fit its table")
def a_table_is_too_short(world):
    world.leave(world.first.pages.pop())


@breaks("I5", "more committed than known")
def more_is_committed_than_known(world):
    world.first.committed = world.first.length + 1


@breaks("I5", "a committed page is not published")
def a_committed_page_is_not_published(world):
    world.first.published -= 1


@breaks("I5", "published beyond its length")
def more_is_published_than_known(world):
    world.first.published += 1


@breaks("I8", "counts tokens as cached")
def more_is_cached_than_complete(world):
    world.first.cached = world.first.committed + 1


@breaks("I3", "twice in its table")
def a_page_is_twice_in_a_table(world):
    world.first.pages.append(world.first.pages[-1])


@breaks("I13", "shares what is written")
def a_shared_page_is_private(world):
    world.states[world.first.pages[0]] = State.PRIVATE


@breaks("I13", "would write what is shared")
def a_page_to_write_is_cached(world):
    world.states[world.first.pages[-1]] = State.CACHED


@breaks("I13", "a private page has two writers")
def two_write_one_page(world):
    world.child.pages[-1] = world.first.pages[-1]


@breaks("I6", "pins other tokens than its own")
def a_token_changes(world):
    world.first.tokens = b"\xff" * 4 + bytes(world.first.tokens[4:])


@breaks("I4", "is not the path's")
def a_table_names_another_page(world):
    world.first.pages[0] = world.twin.pages[0]


@breaks("I4", "its path has another length")
def a_path_has_another_length(world):
    world.first.depth += 1


# -- counters, lines, sessions -------------------------------------------------------------------------------------


@breaks("I24", "is charged")
def a_session_is_charged_too_little(world):
    world.session.charged["a"] -= 1


@breaks("I24", "floors lack")
def the_floors_are_miscounted(world):
    world.pool.floors_missing += 1


@breaks("I24", "cached pages, counted")
def cached_pages_are_miscounted(world):
    world.pool.tree.cached_pages += 1


@breaks("I24", "idle pages, counted")
def idle_pages_are_miscounted(world):
    world.pool.tree.idle_pages += 1


@breaks("I24", "nodes, counted")
def nodes_are_miscounted(world):
    world.pool.tree.nodes += 1


@breaks("I24", "sequences, counted")
def sequences_are_miscounted(world):
    world.pool.sequences += 1


@breaks("I24", "a counter is negative")
def a_counter_is_negative(world):
    world.pool.counters["evicted_pages"] = -1


@breaks("I24", "users, ")
def a_namespace_has_a_user_too_many(world):
    world.pool.namespaces.of(world.root).users += 1


@breaks("I19", "more wait than may")
def too_many_wait(world):
    waiting = world.pool.waiting.first()
    for request in range(1000, 1000 + world.engine.config.limits.queued):
        world.pool.waiting.join(waiting._replace(request=request))


@breaks("I10", "the line and the sessions disagree")
def who_waits_is_forgotten(world):
    world.other.waiting.clear()


@breaks("I24", "requests wait, counted")
def who_waits_is_not_counted(world):
    world.engine.queued -= 1


@breaks("I10", "nobody would wake those who wait")
def nobody_looks_at_the_clock(world):
    world.pool.waiting._ends.clear()


@breaks("I19", "too many replies are kept")
def too_many_replies_are_kept(world):
    world.session.window._keep = 10**6
    for request in range(10_000, 10_000 + world.engine.config.server.keep_replies):
        world.session.window.keep(request, commands.Done())


@breaks("I18", "wider than it may be")
def the_window_is_too_wide(world):
    world.session.window._missing = set(range(SPAN))


@breaks("I15", "belongs to two holders")
def two_sessions_have_one_sequence(world):
    world.other.sequences[99] = world.first


@breaks("I15", "is filed under")
def a_sequence_has_another_id(world):
    world.first.id += 50


@breaks("I15", "believes in another session")
def a_sequence_believes_in_another_session(world):
    world.first.session += 50


@breaks("I15", "in transit and still owned")
def a_moving_sequence_is_still_owned(world):
    world.moving.session = world.session.id


@breaks("I14", "two sessions share a slot")
def two_sessions_share_a_slot(world):
    world.other.slot = world.session.slot


# -- what others compute -------------------------------------------------------------------------------------------


@breaks("I10", "which nobody knows", Flying)
def flights_are_forgotten(world):
    world.pool.flights = None


@breaks("I10", "not known who computes what", Flying)
def a_flight_is_forgotten(world):
    del world.flights.starts[world.first]


@breaks("I10", "would never be woken", Flying)
def one_who_waits_is_forgotten(world):
    world.flights.waits_for.popitem()


@breaks("I10", "what nobody computes", Flying)
def one_waits_for_nothing(world):
    world.flights.waits_for.update(dict.fromkeys(world.flights.waits_for, world.pool))


@breaks("I10", "wait for one another", Flying)
def two_sessions_wait_for_one_another(world):
    world.flights.waits_for.update(dict.fromkeys(world.flights.waits_for, world.second))


@breaks("I24", " counts for namespace ", Bounded)
def a_page_counts_for_another_namespace(world):
    (run,) = world.pool.order
    world.shares._owners[int.from_bytes(run.pages, "little")] = 7


@breaks("I24", "free and counts for namespace ", Bounded)
def a_free_page_counts_for_a_namespace(world):
    world.shares._owners[world.pool.pages.free.ids()[0]] = 0


# -- two tiers -------------------------------------------------------------------------------------------------------


@breaks("I9", "a host tier that does not exist")
def a_run_is_in_a_tier_that_is_not_there(world):
    world.idle.host = world.idle.pages


@breaks("I9", "partly in one tier", Tiers)
def the_host_tier_has_half_of_a_run(world):
    world.clean.host = world.clean.host[:4]


@breaks("I7", "what comes before it is not", Tiers)
def a_run_on_the_device_hangs_below_one_that_is_not(world):
    above = world.saved.parent
    above.host, above.pages = above.pages, b""


@breaks("I11", "left the tree while they were copied", Tiers)
def what_is_saved_leaves_the_tree(world):
    world.saved.pages, world.saved.host = b"", world.saved.pages


@breaks("I11", "left the tree while they were being read", Tiers)
def what_is_loaded_leaves_the_tree(world):
    world.loaded.host = world.clean.host


@breaks("I1", "host pages ", Tiers)
def host_pages_are_miscounted(world):
    world.host.pages.counts[State.FREE] += 1


@breaks("I1", " places, ", Tiers)
def two_runs_have_the_same_host_pages(world):
    world.below.host = world.clean.host


@breaks("I1", "a host page is not ", Tiers)
def a_full_host_page_believes_to_be_filled(world):
    world.host.pages.states[world.clean.host[0]] = State.LOADING


@breaks("I7", "the host tier's order lacks a node", Tiers)
def a_run_cannot_leave_the_host_tier(world):
    world.host.order.remove(world.below)


@breaks("I7", "evicted before its child", Tiers)
def in_the_host_tier_a_parent_goes_before_its_child(world):
    tail = world.pool.tree.cut(world.below, 1)
    world.host.order.add(tail)


@breaks("I24", "in the host tier alone, counted", Tiers)
def what_is_in_the_host_tier_alone_is_miscounted(world):
    world.host.only_pages -= 1


@breaks("I11", "and knows", Early)
def a_sequence_does_not_know_which_pages_are_loading(world):
    world.seq.loading = range(1)


@breaks("I11", "no copy fills its pages", Early)
def a_sequence_forgets_the_copy(world):
    world.seq.load = None


@breaks("I11", "will not tell it of its end", Early)
def a_copy_forgets_its_reader(world):
    world.load.readers.clear()


@breaks("I11", "readers that are over", Early)
def a_reader_is_not_taken_off_the_copy(world):
    del world.engine.sessions.find_quietly(2).sequences[1]


@breaks("I11", "another copy fills its pages", Early)
def a_copy_fills_other_pages(world):
    world.load.runs[0].device[0] = world.pool.pages.free.ids()[0]


@breaks("I7", "not on the device and not loading", Early)
def a_path_reaches_into_the_host_tier(world):
    world.seq.loading = range(0)


@breaks("I24", "too many are in the host tier alone", Tiers)
def the_host_tier_is_overfull(world):
    world.pair.finish_all()
    world.host.limit = 1


@breaks("I24", "pages to be filled, counted", Tiers)
def what_is_being_saved_is_miscounted(world):
    world.host.saving_pages += 1


@breaks("I24", "pages leave, counted", Tiers)
def what_is_being_loaded_is_miscounted(world):
    world.host.leaving_pages -= 1


@breaks("I24", "a host copy that could be dropped", Tiers)
def a_host_copy_is_forgotten(world):
    world.host.clean.clear()


# -- the tests ------------------------------------------------------------------------------------------------------


class _Enough(Exception):
    """Everything that one damage breaks has been seen."""


def broken_by(engine, monkeypatch):
    """All (name, message) that do not hold: the checks go on after the first."""
    found = []

    def need(true, name, message):
        if not true:
            found.append((name, message))
        if len(found) > 100:
            raise _Enough

    monkeypatch.setattr(invariants, "need", need)
    try:
        invariants.check(engine)
    except BrokenInvariant as error:  # the policy's own recount, which ends with the first
        found.append((error.name, str(error).partition(": ")[2]))
    except (_Enough, LookupError, AttributeError, AssertionError):
        assert found  # a recount over damaged state may stumble, but not before it has said why
    monkeypatch.undo()
    return found


@pytest.mark.parametrize(("make", "damage", "name", "message"), CASES)
def test_damage_is_caught_by_name(make, damage, name, message, monkeypatch):
    world = make()
    damage(world)
    with pytest.raises(BrokenInvariant) as caught:
        invariants.check(world.engine)
    broken = broken_by(world.engine, monkeypatch)
    assert (caught.value.name, str(caught.value).partition(": ")[2]) == broken[0]
    assert [said for named, said in broken if named == name and message in said], broken[:8]


@pytest.mark.parametrize("make", [World, Tiers, Early])
def test_a_sound_engine_passes(make):
    assert invariants.check(make().engine) is None


def test_every_check_is_broken_by_a_case():
    """The name and the constant words of each ``need(...)`` in the file are those of some case."""
    tree = ast.parse(Path(invariants.__file__).read_text())
    checks = []
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "need":
            name, message = call.args[1], call.args[2]
            parts = message.values if isinstance(message, ast.JoinedStr) else [message]
            words = "\0".join(part.value for part in parts if isinstance(part, ast.Constant))
            checks.append((name.value, words))
    cases = [(case.values[2], case.values[3]) for case in CASES]
    untested = [check for check in checks if not any(check[0] == name and said in check[1] for name, said in cases)]
    assert len(checks) > 50
    assert untested == []
