"""Hypothesis drives the page pool beside a dict of states; every rule leaves both the same."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fuzz.model.allocator import ALLOWED, EVENTS, STATES
from fuzz.pairs.allocator import AllocatorPair

INNER_MOVES = sorted(move for move, after in ALLOWED.items() if "FREE" not in (move[0], after))
GIVING_BACK = sorted(move for move, after in ALLOWED.items() if after == "FREE")


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(pages=st.integers(1, 70))
    def start(self, pages):
        self.pair = AllocatorPair(pages)

    def some(self, data, state):
        """A part of the pages in ``state`` that have one holder at most, in any order."""
        pages = [page for page in self.pair.model.pages(state) if self.pair.model.holders.get(page, 1) == 1]
        return data.draw(st.lists(st.sampled_from(pages), unique=True)) if pages else []

    @rule(data=st.data())
    def take(self, data):
        self.pair.take(data.draw(st.integers(0, len(self.pair.model.pages("FREE")))))

    @rule(data=st.data(), move=st.sampled_from(INNER_MOVES))
    def move(self, data, move):
        self.pair.move(self.some(data, move[0]), *move)

    @rule(data=st.data(), move=st.sampled_from(GIVING_BACK))
    def give(self, data, move):
        self.pair.give(self.some(data, move[0]), *move)

    @precondition(lambda self: self.pair.model.holders)
    @rule(data=st.data(), times=st.integers(1, 3))
    def hold(self, data, times):
        self.pair.hold(data.draw(st.sampled_from(sorted(self.pair.model.holders))), times)

    @precondition(lambda self: self.pair.model.holders)
    @rule(data=st.data())
    def drop(self, data):
        self.pair.drop(data.draw(st.sampled_from(sorted(self.pair.model.holders))))

    @rule(data=st.data(), said=st.sampled_from(STATES), real=st.sampled_from(STATES), event=st.sampled_from(EVENTS))
    def wrong_move(self, data, said, real, event):
        pages = self.some(data, real)
        if pages and (said != real or (said, event) not in ALLOWED):
            self.pair.wrong_move(pages, said, event)

    @invariant()
    def same(self):
        if hasattr(self, "pair"):
            self.pair.check()


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=max(60, settings().max_examples))
