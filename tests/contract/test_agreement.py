"""Whatever was done to a sequence, client and daemon agree about it: a handoff shows what the daemon has."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import radixkv

TOKENS = st.lists(st.integers(0, 1), max_size=9)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), TOKENS, st.integers(0, 6)),
        st.tuples(st.just("commit"), st.integers(0, 30)),
        st.tuples(st.just("truncate"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("share"), st.none() | st.integers(0, 30), st.integers(0, 2)),
        st.tuples(st.just("compact")),
        st.tuples(st.just("copied")),
        st.tuples(st.just("reserve"), TOKENS, st.sampled_from(["copy", "keep", "drop"]), st.booleans()),
        st.tuples(st.just("done")),
        st.tuples(st.just("switch"), st.integers(0, 3)),
    ),
    max_size=25,
)


class Life:
    """Carries operations out; some are fenced by an event that is done a few operations later."""

    def __init__(self, pool: Any, ns: Any, new_fence: Any) -> None:
        self.pool = pool
        self.ns = ns
        self.new_fence = new_fence
        self.sequences: list[Any] = [pool.reserve([], namespace=ns)]
        self.current = 0
        self.fences: list[Any] = []

    def fence(self) -> Any:
        self.fences.append(self.new_fence())
        return self.fences[-1]

    def carry_out(self, kind: str, *arguments: Any) -> None:
        seq = self.sequences[self.current]
        match kind:
            case "extend":
                seq.extend(arguments[0], headroom_tokens=arguments[1])
            case "commit":
                seq.commit(arguments[0], after=self.fence())
            case "truncate":
                seq.truncate(arguments[0], after=self.fence() if arguments[1] else None, copy=arguments[1])
            case "share":
                self.sequences += seq.share(at=arguments[0], count=arguments[1])
            case "compact":
                seq.compact()
            case "copied":
                seq.copied()
            case "reserve":
                tokens, last_page, copy = arguments
                self.sequences.append(self.pool.reserve(tokens, namespace=self.ns, last_page=last_page, copy=copy))
            case "done":
                for fence in self.fences:
                    fence.done = True
            case "switch":
                self.current = min(arguments[0], len(self.sequences) - 1)

    def settle(self) -> None:
        while True:
            try:
                self.pool.flush()
                return
            except radixkv.RadixKVError:
                continue


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(operations=OPERATIONS)
def test_a_handoff_shows_what_the_client_knew(
    client: Any, pool: Any, ns: Any, new_fence: Any, operations: list[Any]
) -> None:
    life = Life(pool, ns, new_fence)
    for operation in operations:
        try:
            life.carry_out(*operation)
        except radixkv.RadixKVError as error:
            assert isinstance(error, radixkv.BadRequest | radixkv.OutOfPages)
    life.settle()
    for seq in life.sequences:
        assert seq.valid()
        known = (
            seq.tokens.tolist(), seq.page_table.tolist(), seq.committed_tokens, seq.cached_tokens,
            seq.writable_from_tokens, seq.length, seq.capacity_tokens,
        )  # fmt: skip
        rows = seq.copy_rows
        with pool.adopt(seq.handoff(), copy=False) as true:
            assert known == (
                true.tokens.tolist(), true.page_table.tolist(), true.committed_tokens, true.cached_tokens,
                true.writable_from_tokens, true.length, true.capacity_tokens,
            )  # fmt: skip
            assert set(rows) <= set(true.copy_rows)
    assert client.stats().pools["default"].sequences == 0


@pytest.mark.parametrize("kind", ["commit", "extend"])
def test_after_an_error_client_and_daemon_agree(pool: Any, ns: Any, kind: str) -> None:
    seq = pool.reserve(range(6), namespace=ns)
    with pytest.raises((radixkv.BadRequest, radixkv.OutOfPages)):
        seq.commit(7) if kind == "commit" else seq.extend([1], headroom_tokens=100)
    with pool.adopt(seq.handoff()) as true:
        assert (true.length, true.committed_tokens, len(true.page_table)) == (6, 0, 2)
