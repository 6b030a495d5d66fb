"""Hypothesis drives the order of eviction beside a list."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fuzz.pairs.recency import RecencyPair


class RecencyMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pair = RecencyPair()

    @rule(key=st.integers(0, 20))
    def add(self, key):
        if key not in self.pair.model.order:
            self.pair.add(key)

    @precondition(lambda self: self.pair.model.order)
    @rule(data=st.data())
    def wake(self, data):
        self.pair.remove(data.draw(st.sampled_from(self.pair.model.order)))

    @precondition(lambda self: self.pair.model.order)
    @rule()
    def evict(self):
        self.pair.remove(self.pair.real.front())

    @invariant()
    def same(self):
        self.pair.check()


TestRecencyMachine = RecencyMachine.TestCase
