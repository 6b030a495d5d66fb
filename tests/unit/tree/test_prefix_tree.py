"""The drawn cases of the prefix tree, a letter a page: how edges split, grow, melt together and are trimmed."""

import pytest

from fuzz.model.packing import pack_pages, pack_tokens, unpack_pages, unpack_tokens
from fuzz.pairs.tree import TreePair
from radixkv.errors import BrokenInvariant
from radixkv.tree.prefix_tree import MERGE_FANOUT
from radixkv.tree.render import render


class Letters:
    """A tree of one-token pages; every operation is also done to the dict of tuples."""

    def __init__(self):
        self.pair = TreePair(page_size=1)
        self.pair.add_root()
        self.root = self.pair.roots[0]

    def insert(self, word):
        """Hold ``word``, all of it in the tree."""
        holder = self.pair.hold(0, list(map(ord, word)))
        self.pair.publish(holder, [ord(letter) for letter in word[len(holder.path[1]) :]])
        self.pair.check()
        return holder

    def hold(self, word):
        holder = self.pair.hold(0, list(map(ord, word)))
        self.pair.check()
        return holder

    def drop(self, *holders):
        for holder in holders:
            self.pair.release(holder)
        self.pair.check()

    def shape(self):
        """``{"ab2": {"cd0": {}}}``: letters and holders of each node."""

        def below(node):
            children = (node.children or {}).values()
            return {f"{''.join(map(chr, unpack_tokens(bytes(c.tokens))))}{c.holders}": below(c) for c in children}

        return below(self.root)


@pytest.fixture
def tree():
    return Letters()


# -- splits of "abcd", as in rax -------------------------------------------------------------------------------------


def test_a_hold_inside_an_edge_splits_it_there_and_the_tail_keeps_its_object(tree):
    tail = tree.insert("abcd")
    node = tail.node
    tree.hold("abx")
    assert tree.shape() == {"ab2": {"cd1": {}}}
    assert tail.node is node and unpack_tokens(bytes(node.tokens)) == [ord("c"), ord("d")]


def test_a_branch_inside_an_edge(tree):
    tree.insert("abcd")
    tree.insert("abx")
    assert tree.shape() == {"ab2": {"cd1": {}, "x1": {}}}


def test_a_branch_behind_the_first_page(tree):
    tree.insert("abcd")
    tree.insert("axyz")
    assert tree.shape() == {"a2": {"bcd1": {}, "xyz1": {}}}


def test_a_branch_before_the_last_page(tree):
    tree.insert("abcd")
    tree.insert("abcx")
    assert tree.shape() == {"abc2": {"d1": {}, "x1": {}}}


def test_a_prefix_of_an_edge_needs_no_new_page(tree):
    tree.insert("abcd")
    tree.insert("ab")
    assert tree.shape() == {"ab2": {"cd1": {}}}


def test_longer_than_an_edge_hangs_a_child_below_it_or_grows_the_holders_own_leaf(tree):
    tree.insert("abcd")
    tree.insert("abcdef")
    assert tree.shape() == {"abcd2": {"ef1": {}}}
    tree.insert("xy")
    tree.pair.publish(tree.pair.holders[-1], [ord("z")])
    assert tree.shape() == {"abcd2": {"ef1": {}}, "xyz1": {}}


def test_nothing_in_common_is_a_second_edge_of_the_root(tree):
    tree.insert("abcd")
    tree.insert("xy")
    assert tree.shape() == {"abcd1": {}, "xy1": {}}


# -- reading changes nothing ----------------------------------------------------------------------------------------


def test_a_match_splits_nothing(tree):
    tree.insert("abcd")
    tree.pair.look(0, list(map(ord, "abx")))
    assert tree.shape() == {"abcd1": {}}
    assert tree.pair.real.splits == 0


@pytest.mark.parametrize("word", ["", "a", "ab", "abc", "abcd", "abcde", "x", "abx", "bcd"])
def test_the_longest_common_prefix_is_found(tree, word):
    tree.insert("abcd")
    tree.insert("abxy")
    tree.pair.look(0, list(map(ord, word)))


# -- letting go -----------------------------------------------------------------------------------------------------


def test_an_only_child_let_go_together_with_its_parent_melts_into_it(tree):
    first, second = tree.insert("abcd"), tree.hold("ab")
    tree.drop(second)
    assert tree.shape() == {"ab1": {"cd1": {}}}
    tree.drop(first)
    assert tree.shape() == {"abcd0": {}}
    assert tree.pair.real.merges == 1


def test_nodes_let_go_at_different_times_do_not_melt(tree):
    first, second = tree.insert("abcd"), tree.hold("ab")
    tree.drop(first)
    tree.drop(second)
    assert tree.shape() == {"ab0": {"cd0": {}}}


def test_a_parent_of_two_does_not_melt(tree):
    tree.drop(tree.insert("abcd"), tree.insert("abxy"))
    assert tree.shape() == {"ab0": {"cd0": {}, "xy0": {}}}


def test_a_melted_node_takes_its_grandchildren_along(tree):
    long = tree.insert("abcdef")
    middle = tree.insert("abcd")
    tree.hold("ab")
    other = tree.insert("abcdxy")
    tree.drop(long)
    tree.drop(middle, tree.pair.holders[1])
    tree.drop(other)
    assert tree.shape() == {"abcd0": {"ef0": {}, "xy0": {}}}


@pytest.mark.parametrize(("children", "melts"), [(MERGE_FANOUT, True), (MERGE_FANOUT + 1, False)])
def test_a_node_with_many_children_stays_as_it_is(tree, children, melts):
    long, short = tree.insert("abcd"), tree.hold("ab")
    tree.drop(*[tree.insert(f"abcd{chr(200 + number)}") for number in range(children)])
    tree.drop(short)
    tree.drop(long)
    assert list(tree.shape()) == (["abcd0"] if melts else ["ab0"])
    assert tree.pair.real.nodes == children + (1 if melts else 2)


def test_lifting_shortens_the_path_inside_an_edge(tree):
    holder = tree.insert("abcd")
    tree.pair.lift(holder, 3)
    tree.pair.check()
    assert tree.shape() == {"a1": {"bcd0": {}}}


# -- eviction -------------------------------------------------------------------------------------------------------


def test_the_tail_of_the_oldest_leaf_goes_first_page_by_page(tree):
    tree.drop(tree.insert("abcd"), tree.insert("xy"))
    for left in ({"abc0": {}, "xy0": {}}, {"ab0": {}, "xy0": {}}, {"a0": {}, "xy0": {}}, {"xy0": {}}, {"x0": {}}, {}):
        tree.pair.evict(1)
        tree.pair.check()
        assert tree.shape() == left


def test_eviction_crosses_from_leaf_to_parent_only_when_the_leaf_is_gone(tree):
    tree.drop(tree.insert("abcd"), tree.insert("abxy"))
    tree.pair.evict(3)
    tree.pair.check()
    assert tree.shape() == {"ab0": {"x0": {}}}


def test_what_is_used_again_goes_last(tree):
    tree.drop(tree.insert("ab"), tree.insert("xy"))
    tree.drop(tree.hold("ab"))
    tree.pair.evict(2)
    assert tree.shape() == {"ab0": {}}


# -- bugs are caught ------------------------------------------------------------------------------------------------


def test_letting_go_twice_is_caught(tree):
    holder = tree.insert("ab")
    tree.pair.release(holder)
    with pytest.raises(BrokenInvariant, match="I3"):
        tree.pair.real.unpin(holder.node, 99)


@pytest.mark.parametrize("word", ["ab", "abcd"])
def test_only_an_idle_leaf_can_be_trimmed(tree, word):
    held = tree.insert("abcd")
    short = tree.insert("ab")
    if word == "ab":
        tree.drop(held, short)
    node = tree.root.children[pack_tokens([ord("a")])] if word == "ab" else held.node  # idle with a child; held
    with pytest.raises(BrokenInvariant, match="I7"):
        tree.pair.real.trim(node, 1)


def test_a_path_longer_than_the_tree_is_caught(tree):
    holder = tree.insert("ab")
    with pytest.raises(BrokenInvariant, match="I9"):
        tree.pair.real.lift(holder.node, 3, 1)


# -- for people -----------------------------------------------------------------------------------------------------


def test_render_shows_a_line_a_node(tree):
    tree.insert("abcd")
    tree.insert("abx")
    lines = render(tree.root).splitlines()
    assert [line.split("tokens=")[0] for line in lines] == ["", "  ", "    ", "    "]
    assert lines[1] == f"  tokens={[97, 98]} pages={[0, 1]} holders=2 stamp=0"


def test_pages_of_a_path_are_in_order_of_the_tokens(tree):
    tree.insert("abcd")
    holder = tree.insert("abxy")
    assert unpack_pages(tree.pair.real.path_pages(holder.node)) == [0, 1, 4, 5]
    assert tree.pair.real.path_pages(tree.root) == pack_pages([])
