"""One property over all policies of eviction, and what each of them is known for.

The property: with any policy the tree is a cache with losses that is always right. What it finds is what was put in;
what is held stays; what does not fit makes the policy's victims leave, leaf first; and no hook costs more, the more
there is in the cache.
"""

import random
import sys
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from fuzz.model.packing import pack_pages, pack_tokens, unpack_pages
from radixkv.config import POLICIES
from radixkv.engine.pool import scope_of
from radixkv.errors import BrokenInvariant
from radixkv.evictor import policies, s3fifo
from radixkv.tree.node import Node, Root
from radixkv.tree.prefix_tree import PrefixTree


class Meter:
    """Counts the calls, of Python and C functions, that policies make."""

    def __init__(self):
        self.calls = 0

    @contextmanager
    def running(self):
        before = sys.getprofile()
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _event(self, frame, event, _argument):
        if event in ("call", "c_call") and "evictor" in frame.f_code.co_filename:
            self.calls += 1


class Cache:
    """Pages of one token each. ``content``: what was written to a page, which is everything up to its token."""

    def __init__(self, policy, pages):
        self.capacity = pages
        self.tree = PrefixTree(1)
        self.order = policies.make(policy, pages, scope_of)
        self.root = Root(0, 1)
        self.free = list(range(pages))
        self.content = {}
        self.held = []
        self.meter = Meter()
        self.hooks = 0
        self.stamp = 0
        self.gone = []

    def _hook(self, name, argument):
        self.hooks += len(argument) if isinstance(argument, list) else 1
        with self.meter.running():
            return getattr(self.order, name)(argument)

    def find(self, prompt):
        """The cached beginning of a prompt: its pages, each with the content that makes it right."""
        match = self.tree.match(self.root, pack_tokens(prompt))
        pages = unpack_pages(b"".join(match.parts))
        assert [self.content[page] for page in pages] == [tuple(prompt[: n + 1]) for n in range(len(pages))]
        return match, pages

    def ask(self, prompt):
        """Hold what is there, compute what is missing as far as there is room. Returns how much was there."""
        match, pages = self.find(prompt)
        node, woken = self.tree.pin(match)
        for run in woken:
            self._hook("remove", run)
        prompt = prompt[: len(pages) + len(self.free) + self.tree.idle_pages]
        missing = prompt[len(pages) :]
        self.make_room(len(missing) - len(self.free))
        if missing:
            new = [self.free.pop() for _ in missing]
            self.content.update((page, tuple(prompt[: len(pages) + n + 1])) for n, page in enumerate(new))
            node = self.tree.grow(node, pack_tokens(missing), pack_pages(new))
        self.held.append((prompt, node))
        return len(pages)

    def make_room(self, count):
        pinned = {page for prompt, _ in self.held for page in self.find(prompt)[1]}
        while count > 0:
            leaf = self._hook("victim", count)
            pages = unpack_pages(self.tree.trim(leaf, count))  # refuses what is held or no leaf
            assert not pinned & set(pages)
            self.gone += [self.content.pop(page)[-1] for page in reversed(pages)]
            self.free += pages
            count -= len(pages)

    def let_go(self, index=-1):
        _, node = self.held.pop(index)
        if node is self.root:
            return
        if self.order.counts_uses:
            self._hook("used", self.tree.path(node))
        self.stamp += 1
        for run in self.tree.unpin(node, self.stamp)[0]:
            self._hook("add", run)

    def use(self, prompt):
        found = self.ask(prompt)
        self.let_go()
        return found

    def check(self):
        self.order.check()
        assert sum(len(run.pages) // 4 for run in self.order) == self.tree.idle_pages
        assert len(self.content) == self.tree.cached_pages == self.capacity - len(self.free)
        for prompt, _ in self.held:
            assert len(self.find(prompt)[1]) == len(prompt), "what is held was lost"


PROMPTS = st.lists(st.integers(0, 3), max_size=6)
STEPS = st.lists(st.tuples(st.sampled_from(["use", "ask", "let go"]), PROMPTS, st.integers(0, 5)), max_size=60)
CALLS_A_HOOK = 40
"""A generous bound on calls inside the policy for each hook (of ``used``: for each run of the path), on average."""


@pytest.mark.parametrize("policy", POLICIES)
@given(pages=st.integers(1, 12), steps=STEPS)
@settings(max_examples=max(100, settings().max_examples))
def test_a_cache_with_losses_that_is_always_right(policy, pages, steps):
    cache = Cache(policy, pages)
    for step, prompt, number in steps:
        if step == "use":
            cache.use(prompt)
        elif step == "ask" and len(cache.held) < 5:
            cache.ask(prompt)
        elif cache.held:
            cache.let_go(number % len(cache.held))
        cache.check()
    assert cache.meter.calls <= CALLS_A_HOOK * (cache.hooks + 1)
    while cache.held:
        cache.let_go()
    cache.make_room(cache.tree.cached_pages)
    assert (cache.tree.nodes, len(cache.order)) == (0, 0)


def churn(policy, leaves):
    """Calls a hook in a full cache of so many leaves: old prompts again, and new ones."""
    cache = Cache(policy, leaves)
    for number in range(leaves):
        cache.use([number])
    rng = random.Random(1)
    cache.meter.calls = cache.hooks = 0
    for number in range(leaves, leaves + 400):
        cache.use([rng.randrange(number)])
        cache.use([number])
    return cache.meter.calls / cache.hooks


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hook_costs_the_same_whatever_the_cache_holds(policy):
    assert churn(policy, 4000) <= 1.5 * churn(policy, 40)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "lru"])
def test_the_heap_of_leaves_does_not_grow_by_use(policy):
    cache = Cache(policy, 4)
    for _ in range(1000):
        cache.use([1])
    (run,) = cache.order
    assert len(cache.order._queue(run)[0]._heap) < 100


# -- what each is known for ----------------------------------------------------------------------------------------


def evicted(policy, pages, prompts, count):
    """The last tokens of the pages that leave first, after these prompts."""
    cache = Cache(policy, pages)
    for prompt in prompts:
        cache.use(prompt)
    cache.make_room(count)
    return cache.gone


A, B, C = [1, 10, 11], [2, 20, 21], [3, 30, 31]


@pytest.mark.parametrize(
    ("policy", "gone"),
    [
        ("lru", [21, 20, 2, 11, 10, 1]),  # asked for longest ago
        ("lfu", [21, 20, 2, 31, 30, 3]),  # asked for least often
        ("fifo", [11, 10, 1, 31, 30, 3]),  # came first
        ("s3fifo", [31, 30, 3, 11, 10, 1]),  # A was asked for twice more: C goes first; then the small queue is short
    ],
)
def test_three_prompts(policy, gone):
    assert evicted(policy, 9, [A, C, B, A, A, C], 6) == gone


@pytest.mark.parametrize(
    ("policy", "gone"),
    [
        ("lru", [11, 31, 21, 20, 2]),  # the ends of A and C were asked for before B, their beginnings after it
        ("lfu", [11, 31, 21, 20, 2]),
        ("fifo", [11, 10, 1, 31, 30]),
        ("s3fifo", [11, 10, 1, 31, 30]),
    ],
)
def test_what_continues_a_page_goes_before_it(policy, gone):
    assert evicted(policy, 9, [A, C, B, B, A[:2], C[:2]], 5) == gone


def test_s3fifo_remembers_what_left_the_small_queue():
    cache = Cache("s3fifo", 20)
    for number in range(20):
        cache.use([number])
    cache.use([50])  # 0 leaves
    cache.use([0])  # it is back, in the main queue; 1 has left
    for number in range(60, 78):  # all others are passed through the small queue
        cache.use([number])
    assert cache.gone[0] == 0 and 0 not in cache.gone[1:]
    assert cache.use([0]) == 1


def test_s3fifo_passes_over_no_more_than_so_many_leaves_for_one_victim():
    pages = 6 * s3fifo.CHANCES
    cache = Cache("s3fifo", pages)
    paths = [[number, 10**6] for number in range(pages // 2)]
    for _ in range(4):
        for path in paths:
            cache.use(path)
    cache.meter.calls = 0
    for _ in range(3):
        cache.make_room(1)
    first, second = (paths[s3fifo.CHANCES * n + n - 1] for n in (1, 2))
    assert cache.gone == [first[1], first[0], second[1]]  # those before have had their second chance
    assert cache.meter.calls <= CALLS_A_HOOK * s3fifo.CHANCES * 2


def test_s3fifo_asks_the_ghost_for_the_first_new_page_of_a_path():
    cache = Cache("s3fifo", 50)
    cache.use([1, 2])
    for number in range(10, 60):
        cache.use([number])
    assert cache.gone == [2, 1]
    cache.ask([1, 5])
    cache.ask([1])  # so that the path is of two nodes
    cache.let_go(0)
    assert {run.mark[0] for run in cache.order} == {s3fifo.SMALL, s3fifo.MAIN}
    (new,) = [run for run in cache.order if unpack_pages(bytes(run.pages))[0] in cache.find([1, 5])[1]]
    assert new.mark[0] == s3fifo.MAIN


@pytest.mark.parametrize("seed", range(20))
def test_s3fifo_knows_a_page_again_however_its_path_is_cut(seed):
    """By 256 tokens before it, and by no more: what a page costs does not grow with its prompt."""
    rng = random.Random(seed)
    size = rng.choice((1, 3, 16, 300))
    order = s3fifo.S3FIFO(8, scope_of)
    root, path, tags = Root(rng.randrange(9), rng.randrange(9)), [], []
    node = root
    while len(path) < 400 + 3 * size:
        pages = rng.randint(1, 60 // size + 2)
        tokens = [rng.randrange(5) for _ in range(pages * size)]
        node = Node(node, pack_tokens(tokens), bytes(4 * pages))
        begin = rng.randint(0, pages - 1)
        tags += order._tags(node, 0, begin) + order._tags(node, begin, pages)
        path += tokens
    text = pack_tokens(path)
    ends = range(4 * size, len(text) + 1, 4 * size)
    assert tags == [
        xxh3_64_intdigest(text[max(0, end - 4 * size - s3fifo.BEHIND_BYTES) : end], scope_of(root)) for end in ends
    ]


# -- the recount ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "lru"])
def test_a_leaf_that_is_not_filed_is_a_broken_invariant(policy):
    cache = Cache(policy, 4)
    cache.use([1])
    (run,) = cache.order
    cache.order._queue(run)[0].discard(run)
    with pytest.raises(BrokenInvariant, match="a leaf is not filed"):
        cache.order.check()


def test_every_policy_has_a_name_and_no_other_name_has_one():
    assert len({type(policies.make(name, 8, scope_of)) for name in POLICIES}) == len(POLICIES)
    with pytest.raises(ValueError, match="clock"):
        policies.make("clock", 8, scope_of)
