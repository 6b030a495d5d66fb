"""Hypothesis drives sessions, leases and reply windows beside dicts that forget nothing."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fuzz.pairs.sessions import SessionsPair


class SessionsMachine(RuleBasedStateMachine):
    @initialize(limit=st.integers(1, 5), keep=st.integers(1, 6), lease_s=st.sampled_from([0.1, 1.0, 10.0]))
    def start(self, limit, keep, lease_s):
        self.pair = SessionsPair(limit, keep, lease_s)
        self.next_session = 1

    @rule()
    def open(self):
        self.pair.open(self.next_session)
        self.next_session += 1

    @rule(back=st.integers(0, 4), epoch=st.sampled_from([1, 1, 1, 0, 2]))
    def find(self, back, epoch):
        self.pair.find(self.next_session - back, epoch)

    @rule(back=st.integers(0, 4))
    def end(self, back):
        self.pair.end(self.next_session - back)

    @precondition(lambda self: self.pair.model.open)
    @rule(data=st.data(), request=st.one_of(st.integers(1, 12), st.integers(1020, 1040), st.integers(1, 2**40)))
    def ask(self, data, request):
        self.pair.ask(data.draw(st.sampled_from(sorted(self.pair.model.open))), request)

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.5, 1.0, 9.5]))
    def time(self, seconds):
        self.pair.pass_time(seconds)

    @invariant()
    def same(self):
        if hasattr(self, "pair"):
            self.pair.check()


TestSessionsMachine = SessionsMachine.TestCase
