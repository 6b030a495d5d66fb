"""Hypothesis drives the prefix tree and each policy of eviction beside a dict of token tuples."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fuzz.pairs.tree import TreePair
from radixkv.config import POLICIES

# A page is one of three words; prompts end inside a page now and then.
WORDS = st.lists(st.sampled_from("xyz"), max_size=8)
HAS_HOLDERS = precondition(lambda self: self.pair.holders)


class TreeMachine(RuleBasedStateMachine):
    @initialize(page_size=st.integers(1, 3), policy=st.sampled_from(POLICIES), pool_pages=st.integers(1, 40))
    def start(self, page_size, policy, pool_pages):
        self.size = page_size
        self.pair = TreePair(page_size, policy, pool_pages)
        self.pair.add_root()

    def tokens(self, words):
        return [token for word in words for token in [ord(word), *[7] * (self.size - 1)]]

    def holder(self, data):
        return self.pair.holders[data.draw(st.integers(0, len(self.pair.holders) - 1))]

    def back(self, data, holder):
        return data.draw(st.integers(0, len(holder.path[1]) // self.size))

    @rule(words=WORDS, tail=st.integers(0, 2), lead=st.integers(0, 9))
    def look(self, words, tail, lead):
        self.pair.look(0, self.tokens(words) + [7] * min(tail, self.size - 1), lead)

    @rule(words=WORDS, more=WORDS)
    def hold_and_publish(self, words, more):
        holder = self.pair.hold(0, self.tokens(words))
        self.pair.publish(holder, self.tokens(more))

    @HAS_HOLDERS
    @rule(data=st.data(), words=WORDS)
    def publish(self, data, words):
        self.pair.publish(self.holder(data), self.tokens(words))

    @HAS_HOLDERS
    @rule(data=st.data())
    def release(self, data):
        self.pair.release(self.holder(data))

    @HAS_HOLDERS
    @rule(data=st.data())
    def lift(self, data):
        holder = self.holder(data)
        self.pair.lift(holder, self.back(data, holder))

    @HAS_HOLDERS
    @rule(data=st.data(), times=st.integers(0, 3))
    def fork(self, data, times):
        holder = self.holder(data)
        self.pair.fork(holder, self.back(data, holder), times)

    @HAS_HOLDERS
    @rule(data=st.data())
    def ask(self, data):
        holder = self.holder(data)
        self.pair.check_queries(holder, self.back(data, holder))

    @rule(pages=st.integers(0, 6))
    def evict(self, pages):
        self.pair.evict(pages)

    @invariant()
    def same(self):
        if hasattr(self, "pair"):
            self.pair.check()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=max(150, settings().max_examples))
