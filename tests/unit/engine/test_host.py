"""The host tier of one pool by itself: whose pages go when there is no room, and what is counted of them."""

from array import array

import pytest

from fuzz.model.packing import pack_pages, pack_tokens, unpack_pages, unpack_tokens
from radixkv.allocator.page_states import CACHED, FREE, LOAD, LOADED, LOADING, SAVE, SAVING
from radixkv.commands import Retire, Stamp
from radixkv.config import KVSpec, PoolConfig
from radixkv.engine.host import Copying, CopyRun, HostTier
from radixkv.tree.node import Root
from radixkv.tree.prefix_tree import PrefixTree

DEVICE = 50
"""Pages there; those of the host tier are behind them in the table."""


class Tier:
    """A letter a page. Runs are hung into the tree as a restart would find them."""

    def __init__(self, pages, staging=0):
        spec = KVSpec(layers=1, kv_heads=1, head_dim=1, page_size=1)
        config = PoolConfig("a", spec, pages=DEVICE, host_pages=pages, host_staging_pages=staging)
        self.emptied = []
        self.tree = PrefixTree(1)
        self.host = HostTier(self.tree, self.emptied.append, config)
        self.root = Root(0, 1)
        self.device = 0

    def _add(self, word, parent, stamp, ids):
        above = parent or self.root
        tokens = pack_tokens([ord(letter) for letter in word])
        node = self.tree.restore(above, tokens, *ids)
        node.stamp = stamp
        return node

    def _fill(self, count):
        pages = self.host.pages.take(count, LOAD)
        self.host.pages.move(pages, LOADING, LOADED)
        return pages.tobytes()

    def both(self, word, stamp, parent=None):
        """On the device as well; later ones are hotter."""
        ids = pack_pages(range(self.device, self.device + len(word)))
        self.device += len(word)
        node = self._add(word, parent, stamp, (ids, self._fill(len(word))))
        self.host.used([node])
        return node

    def only(self, word, stamp, parent=None):
        node = self._add(word, parent, stamp, (b"", self._fill(len(word))))
        self.host.only_pages += len(word)
        self.host.order.add(node)
        return node

    def words(self):
        """What is in the host tier, in the order of eviction, - if it is nowhere else."""
        runs = [(run, "-") for run in self.host.order] + [(run, "") for run in self.host.clean]
        return ["".join(map(chr, unpack_tokens(bytes(run.tokens)))) + mark for run, mark in runs]

    def free(self):
        return self.host.pages.counts[FREE]


def test_what_is_free_is_taken_first():
    tier = Tier(4)
    tier.only("ab", 1)
    assert len(tier.host.take(2)) == 2 and tier.words() == ["ab-"]
    assert tier.host.pages.counts[LOADING] == 2


def test_then_copies_go_of_the_hottest_of_what_the_device_has():
    tier = Tier(6)
    tier.only("ab", 1)
    cold, hot = tier.both("cd", 2), tier.both("ef", 3)
    assert len(tier.host.take(1)) == 1
    assert (tier.words(), hot.host, bool(cold.host), tier.free()) == (["ab-", "cd"], b"", True, 1)


def test_then_what_is_nowhere_else_the_coldest_end_first():
    tier = Tier(4)
    tier.only("ab", 2)
    tier.only("cd", 1)
    assert len(tier.host.take(3)) == 3
    assert (tier.words(), tier.host.evicted_pages, tier.host.only_pages) == (["a-"], 3, 1)


def test_no_more_is_taken_than_may_be_there_whatever_room_there_is():
    tier = Tier(2, staging=8)
    assert len(tier.host.take(5)) == 2
    assert tier.free() == 8


def test_what_leaves_makes_room_and_what_comes_takes_it():
    tier = Tier(4, staging=4)
    node = tier.only("abcd", 1)
    tier.tree.hold(node)
    tier.host.order.remove(node)  # as a load would
    assert len(tier.host.take(2)) == 0
    assert len(tier.host.take(2, leaving=3)) == 2
    assert len(tier.host.take(4, leaving=-1)) == 0


def test_a_copy_that_is_being_read_stays_though_it_was_computed_again_meanwhile():
    tier = Tier(3)
    read, other = tier.both("ab", 2), tier.both("c", 1)
    tier.host.used([read])  # the hottest
    tier.host.pages.move(array("i", bytes(read.host)), CACHED, SAVE)
    assert len(tier.host.take(3)) == 1
    assert (tier.words(), len(read.host), other.host) == (["ab"], 8, b"")


def test_what_a_copy_holds_stays():
    tier = Tier(3)
    held, other = tier.only("ab", 1), tier.only("c", 2)
    for node in tier.tree.hold(held):
        tier.host.order.remove(node)
    tier.host.evict(9)
    assert (tier.words(), tier.host.only_pages, other.parent) == ([], 2, None)
    assert tier.free() == 1 and held.parent is tier.root


@pytest.mark.parametrize("host", [1, 2, 3])
def test_what_sinks_beyond_the_limit_pushes_the_coldest_out(host):
    tier = Tier(host, staging=9)
    tier.only("x", 1)
    node = tier.both("abc", 2)
    assert unpack_pages(tier.host.sink(node, 2)) == [1, 2]
    assert tier.words() == {1: ["b-", "a"], 2: ["bc-", "a"], 3: ["x-", "bc-", "a"]}[host]
    assert tier.host.only_pages == host and tier.host.evicted_pages == 3 - host


def test_what_sinks_in_parts_is_one_run():
    tier = Tier(9)
    node = tier.both("abc", 2)
    for count in (1, 1, 1):
        tier.host.sink(node, count)
    assert (tier.words(), tier.tree.nodes, tier.host.only_pages) == (["abc-"], 1, 3)


def test_what_surfaces_counts_as_hot():
    tier = Tier(9)
    cold, warm = tier.only("ab", 1), tier.both("c", 2)
    tier.tree.hold(cold)
    tier.host.order.remove(cold)
    tier.host.surface(cold, pack_pages([20, 21]))
    assert tier.words() == ["c", "ab"] and tier.host.only_pages == 0
    tier.host.used([warm])
    assert tier.words() == ["ab", "c"]


def test_what_is_saved_is_cold():
    tier = Tier(9)
    tier.both("a", 1)
    node = tier._add("bc", None, 5, (pack_pages([30, 31]), b""))
    tier.host.cover(node, tier._fill(2))
    assert tier.words() == ["bc", "a"]


def test_of_what_has_melted_into_another_nothing_is_given_back_twice():
    tier = Tier(4)
    top = tier.both("ab", 1)
    below = tier.both("cd", 1, top)
    tier.tree.hold(below)
    (melted,) = tier.tree.unpin(below, 7)[0]
    assert melted is top and tier.words() == ["abcd", "cd"]
    assert len(tier.host.take(1)) == 1
    assert (tier.free(), top.host, len(tier.host.clean)) == (3, b"", 0)


def test_those_that_have_melted_do_not_pile_up():
    tier = Tier(400)
    top = tier.both("a", 1)
    for letter in range(200):
        below = tier.both(chr(1000 + letter), 1, top)
        tier.tree.hold(below)
        tier.host.used(tier.tree.unpin(below, letter + 2)[0])
    assert tier.tree.nodes == 1 and len(tier.host.clean) <= 2 * 1 + 64 + 1


def test_what_followed_a_page_goes_with_it():
    tier = Tier(9)
    top = tier.both("a", 3)
    middle = tier.only("bc", 2, top)
    tier.only("d", 1, middle)
    tier.only("e", 1, top)
    tier.host.drop_below(top)
    assert (tier.words(), tier.host.only_pages, tier.host.evicted_pages) == (["a"], 0, 4)
    assert top.children is None and tier.free() == 8


def test_of_a_run_that_leaves_the_tree_everything_is_given_back():
    tier = Tier(9)
    for node in (tier.both("ab", 1), tier.only("cd", 2)):
        tier.host.forget(node)
        assert not node.host
    assert (tier.free(), tier.host.only_pages, tier.words()) == (9, 0, [])


def test_a_root_is_told_of_when_its_last_run_has_gone():
    tier = Tier(4)
    tier.only("ab", 1)
    tier.host.evict(1)
    assert tier.emptied == []
    tier.host.evict(1)
    assert tier.emptied == [tier.root]


def test_the_table_is_told_of_what_is_free_and_of_new_ends():
    tier = Tier(4)
    node = tier.only("ab", 7)
    first, second = unpack_pages(bytes(node.host))
    tier.host.evict(1)
    assert tier.host.writes == [
        Retire("a", pack_pages([DEVICE + second])),
        Stamp("a", pack_pages([DEVICE + first]), 7),
    ]


def test_a_run_that_has_been_split_is_all_its_parts():
    tier = Tier(8)
    node = tier.only("abcd", 1)
    run = CopyRun(node, array("i"), array("i", [1, 2, 3]))
    assert run.spanned() == [node]
    tail = tier.tree.cut(node, 3)
    run.node = tail
    assert run.spanned() == [tail, node]
    copying = Copying(1, False, [run], guard=node)
    assert (copying.pages, copying.ends) == (3, [tail, node])


def test_pages_that_are_read_are_not_taken():
    tier = Tier(2)
    node = tier.only("ab", 1)
    tier.tree.hold(node)
    tier.host.order.remove(node)
    pages, read = tier.host.pages, array("i", bytes(node.host))
    pages.move(read, CACHED, SAVE)
    tier.host.leaving_pages = 2
    assert len(tier.host.take(2)) == 0  # they leave, but have not yet
    assert [pages.states[page] for page in read] == [SAVING] * 2
