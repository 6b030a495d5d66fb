"""Hypothesis drives the whole engine beside the naive one: replies, counts, writes and invariants after every step."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fuzz.model.packing import pack_tokens
from fuzz.pairs.engine import EnginePair
from fuzz.targets.engine import random_config
from radixkv import commands

NAMESPACES = st.sampled_from([b"", b"\0", b"a"])
WORDS = st.lists(st.sampled_from([1, 2, 3]), max_size=6)
OPTIONS = st.fixed_dictionaries(
    {
        "headroom": st.sampled_from([0, 0, 1, 9]),
        "last_page": st.sampled_from(["copy", "keep", "drop"]),
        "wait_s": st.sampled_from([0.0, 0.0, 1.0, 5.0]),
    }
)
HAS_SEQUENCES = precondition(lambda self: self.pair.model.state.sequences())


class EngineMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 10_000), sessions=st.integers(1, 3))
    def start(self, seed, sessions):
        self.pair = EnginePair(random_config(random.Random(seed)))
        self.next_seq = 0
        for _ in range(sessions):
            self.pair.open()

    def session(self, data):
        sessions = sorted(self.pair.model.state.sessions)
        return data.draw(st.sampled_from(sessions)) if sessions else self.pair.open()

    def sequence(self, data):
        """A session with one of its sequences (id, model's record); of a session without any: none of them."""
        session = self.session(data)
        known = self.pair.model.state.sessions.get(session)
        if known is None or not known.sequences:
            return session, 0, None
        seq = data.draw(st.sampled_from(sorted(known.sequences)))
        return session, seq, known.sequences[seq]

    def tokens(self, pool, words, tail):
        size = self.pair.model.state.pools[pool].page_size
        return pack_tokens([token for word in words for token in [word] * size] + [9] * (tail % size))

    def step(self, session, **items):
        self.pair.ask(session, commands.Step(**items))

    @rule(data=st.data(), namespace=NAMESPACES, words=WORDS, options=OPTIONS, computed=st.booleans())
    def reserve(self, data, namespace, words, options, computed):
        session = self.session(data)
        pool = data.draw(st.sampled_from(sorted(self.pair.model.state.pools)))
        self.next_seq += 1
        tokens = self.tokens(pool, words, data.draw(st.integers(0, 15)))
        self.pair.ask(session, commands.Reserve(pool, self.next_seq, namespace, tokens, **options))
        known = self.pair.model.state.sessions.get(session)
        if computed and known and self.next_seq in known.sequences:
            self.step(session, commit=[commands.Commit(self.next_seq, len(tokens) // 4)])

    @HAS_SEQUENCES
    @rule(data=st.data(), offset=st.integers(-1, 1))
    def commit(self, data, offset):
        session, seq, sequence = self.sequence(data)
        if sequence:
            n = data.draw(st.integers(sequence.committed, len(sequence.tokens)))
            self.step(session, commit=[commands.Commit(seq, max(0, n + offset))])

    @HAS_SEQUENCES
    @rule(data=st.data())
    def free(self, data):
        session, seq, _ = self.sequence(data)
        self.step(session, free=[commands.Free(seq)], truncate=[commands.Truncate(seq, 0)])

    @HAS_SEQUENCES
    @rule(data=st.data())
    def truncate(self, data):
        session, seq, sequence = self.sequence(data)
        if sequence:
            n = data.draw(st.integers(0, len(sequence.tokens)))
            self.step(session, truncate=[commands.Truncate(seq, n)])

    @HAS_SEQUENCES
    @rule(data=st.data(), words=WORDS, tail=st.integers(0, 15), headroom=st.integers(0, 5))
    def extend(self, data, words, tail, headroom):
        session, seq, sequence = self.sequence(data)
        if sequence:
            tokens = self.tokens(sequence.pool, words, tail)
            self.step(session, extend=[commands.Extend(seq, tokens, headroom)])

    @HAS_SEQUENCES
    @rule(data=st.data(), count=st.integers(0, 3))
    def share(self, data, count):
        session, seq, sequence = self.sequence(data)
        if sequence:
            at = data.draw(st.none() | st.integers(0, sequence.committed + 1))
            self.step(session, share=[commands.Share(seq, at, count, self.next_seq + 1)])
            self.next_seq += count

    @HAS_SEQUENCES
    @rule(data=st.data())
    def copied_and_compact(self, data):
        session, seq, _ = self.sequence(data)
        self.step(session, copied=[seq])
        self.pair.ask(session, commands.Compact(seq))

    @HAS_SEQUENCES
    @rule(data=st.data(), ticket=st.sampled_from([b"1" * 16, b"2" * 16]), ttl_s=st.sampled_from([0.0, 2.0]))
    def handoff(self, data, ticket, ttl_s):
        session, seq, _ = self.sequence(data)
        self.pair.ask(session, commands.Handoff(seq, ticket, ttl_s))

    @rule(data=st.data(), ticket=st.sampled_from([b"1" * 16, b"2" * 16]))
    def adopt(self, data, ticket):
        session = self.session(data)
        self.next_seq += 1
        self.pair.ask(session, commands.Adopt("a", ticket, self.next_seq))

    @rule(data=st.data(), namespace=NAMESPACES, words=WORDS)
    def lookup_and_invalidate(self, data, namespace, words):
        self.pair.ask(0, commands.Lookup("a", namespace, [self.tokens("a", words, 3)]))
        if data.draw(st.integers(0, 3)) == 0:
            self.pair.ask(self.session(data), commands.Invalidate("a", namespace))

    @rule(data=st.data(), mapped=st.booleans(), gone=st.booleans())
    def end(self, data, mapped, gone):
        session = self.session(data)
        self.pair.do(commands.EndSession(session, mapped, "gone"))
        if gone:
            self.pair.do(commands.MappingGone(session))
        self.pair.open()

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 25.0]))
    def time(self, seconds):
        self.pair.tick(seconds)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=max(200, settings().max_examples))
