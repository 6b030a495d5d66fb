"""The prefix tree with a host tier, a letter a page: runs sink, melt together, surface and are cut."""

import pytest

from fuzz.model.packing import pack_pages, pack_tokens, unpack_pages, unpack_tokens
from radixkv.errors import BrokenInvariant
from radixkv.tree.node import Root
from radixkv.tree.prefix_tree import MERGE_FANOUT, PrefixTree


class Letters:
    """``add`` hangs a run below another; pages on the device count from 0, in the host tier from 100."""

    def __init__(self):
        self.tree = PrefixTree(1)
        self.root = Root(0, 1)
        self.next = 0

    def add(self, word, parent=None, host=False, stamp=1):
        above = parent or self.root
        tokens = pack_tokens([ord(letter) for letter in word])
        pages = range(self.next, self.next + len(word))
        self.next += len(word)
        ids = pack_pages(pages), pack_pages([100 + page for page in pages] if host else [])
        node = self.tree.restore(above, tokens, *ids)
        node.stamp = stamp
        return node

    def match(self, word):
        """Pages matched on the device, and behind them in the host tier."""
        tokens = pack_tokens([ord(letter) for letter in word])
        here = self.tree.match(self.root, tokens)
        there = self.tree.match_host(here, tokens)
        return here, there

    def find(self, word):
        here, there = self.match(word)
        return here.pages, unpack_pages(b"".join(bytes(part) for part in there.parts))

    def shape(self):
        """``{"ab+": {"cd-": {}}}``: + on both tiers, - in the host tier alone."""

        def below(node):
            mark = {(True, False): "", (True, True): "+", (False, True): "-"}
            return {
                "".join(map(chr, unpack_tokens(bytes(c.tokens)))) + mark[bool(c.pages), bool(c.host)]: below(c)
                for c in (node.children or {}).values()
            }

        return below(self.root)

    def counts(self):
        return self.tree.nodes, self.tree.cached_pages, self.tree.idle_pages


@pytest.fixture
def letters():
    return Letters()


def test_the_tail_of_a_run_sinks_and_can_be_found_there(letters):
    node = letters.add("abcd", host=True)
    packed, sunk, melted = letters.tree.sink(node, 2)
    assert (unpack_pages(packed), melted) == ([2, 3], None)
    assert letters.shape() == {"ab+": {"cd-": {}}} and sunk.parent is node
    assert letters.counts() == (2, 2, 2)
    assert letters.find("abcx") == (2, [102])
    assert letters.find("abcd") == (2, [102, 103])
    assert letters.find("xbcd") == (0, [])


def test_what_sinks_melts_with_what_was_let_go_of_with_it(letters):
    node = letters.add("abcd", host=True)
    letters.tree.sink(node, 2)
    packed, sunk, melted = letters.tree.sink(node, 1)
    assert unpack_pages(packed) == [1] and unpack_tokens(bytes(sunk.tokens)) == [ord(c) for c in "bcd"]
    assert sunk.page_count == 3
    assert letters.shape() == {"a+": {"bcd-": {}}} and melted.parent is None
    assert letters.find("abcd") == (1, [101, 102, 103])
    _, sunk, _ = letters.tree.sink(node, 1)
    assert letters.shape() == {"abcd-": {}} and sunk is node
    assert letters.counts() == (1, 0, 0)


def test_what_was_let_go_of_at_another_time_stays_apart(letters):
    node = letters.add("ab", host=True, stamp=2)
    letters.add("cd", node, host=True, stamp=1)
    letters.tree.sink(node.children[pack_tokens([ord("c")])], 2)
    assert letters.tree.sink(node, 2)[2] is None
    assert letters.shape() == {"ab-": {"cd-": {}}}


def test_what_somebody_holds_does_not_melt(letters):
    node = letters.add("abcd", host=True)
    _, sunk, _ = letters.tree.sink(node, 2)
    sunk.holders = 1  # of a copy
    assert letters.tree.sink(node, 2)[2] is None


def test_what_has_many_children_does_not_melt(letters):
    node = letters.add("ab", host=True)
    for place in range(MERGE_FANOUT + 1):
        letters.tree.sink(letters.add(chr(1000 + place), node, host=True), 1)
    letters.tree.sink(node, 1)
    assert letters.tree.sink(node, 1)[2] is None
    assert letters.counts()[0] == MERGE_FANOUT + 3


@pytest.mark.parametrize("broken", ["held", "dirty"])
def test_only_idle_runs_with_host_copies_sink(letters, broken):
    node = letters.add("ab", host=broken == "held")
    node.holders = int(broken == "held")
    with pytest.raises(BrokenInvariant, match="can leave the device"):
        letters.tree.sink(node, 1)
    assert letters.counts()[1] == 2


def test_a_run_surfaces_while_it_is_held_and_falls_idle_without_a_new_stamp(letters):
    node = letters.add("abcd", host=True, stamp=5)
    letters.tree.sink(node, 4)
    here, there = letters.match("abc")
    assert (here.pages, there.pages) == (0, 3)
    end, woken = letters.tree.pin(there)
    assert woken == [] and letters.shape() == {"abc-": {"d-": {}}}  # the tail keeps its place, the head had none
    letters.tree.surface(end, pack_pages([7, 8, 9]))
    assert letters.shape() == {"abc+": {"d-": {}}} and letters.counts() == (2, 3, 0)
    assert letters.tree.release(end) == [end]
    assert (end.stamp, letters.counts()) == (5, (2, 3, 3))
    assert letters.find("abcd") == (3, [103])


def test_a_path_held_twice_falls_idle_with_the_last_release(letters):
    node = letters.add("ab")
    letters.tree.hold(node)
    letters.tree.hold(node)
    assert letters.tree.release(node) == [] and letters.tree.release(node) == [node]


def test_a_split_and_a_cut_give_each_part_its_host_pages(letters):
    node = letters.add("abcd", host=True)
    tail = letters.tree.cut(node, 3)
    assert (unpack_pages(bytes(node.host)), unpack_pages(bytes(tail.host))) == ([100, 101, 102], [103])
    head, _ = letters.tree.pin(letters.match("ab")[0])
    assert (unpack_pages(bytes(head.host)), unpack_pages(bytes(node.host))) == ([100, 101], [102])
    assert (head.stamp, tail.stamp, letters.counts()) == (1, 1, (3, 4, 2))


def test_a_cut_run_keeps_its_children_behind_the_tail(letters):
    node = letters.add("abc")
    child = letters.add("d", node)
    tail = letters.tree.cut(node, 1)
    assert child.parent is tail and tail.parent is node and letters.shape() == {"a": {"bc": {"d": {}}}}


def test_trimming_forgets_host_pages_too(letters):
    node = letters.add("abcd", host=True)
    assert unpack_pages(letters.tree.trim(node, 1)) == [3]
    assert unpack_pages(bytes(node.host)) == [100, 101, 102]
    letters.tree.sink(node, 3)
    assert letters.tree.trim(node, 1) == b""  # of the device there was nothing
    assert (letters.find("abcd"), letters.counts()) == ((0, [100, 101]), (1, 0, 0))


def test_runs_on_one_and_on_both_tiers_do_not_merge(letters):
    node = letters.add("ab", host=True)
    below = letters.add("cd", node)
    letters.tree.hold(below)
    idle, _ = letters.tree.unpin(below, 9)
    assert idle == [below, node] and letters.shape() == {"ab+": {"cd": {}}}
    below.host = pack_pages([102, 103])
    letters.tree.hold(below)
    assert len(letters.tree.unpin(below, 10)[0]) == 1
    assert letters.shape() == {"abcd+": {}} and letters.find("abcd") == (4, [])
    assert unpack_pages(bytes(node.host)) == [100, 101, 102, 103]


def test_new_pages_are_not_appended_to_a_run_that_the_host_tier_has(letters):
    node = letters.add("ab", host=True)
    letters.tree.hold(node)
    grown = letters.tree.grow(node, pack_tokens([ord("c")]), pack_pages([9]))
    assert grown is not node and letters.shape() == {"ab+": {"c": {}}}
