"""``after=``: the call returns at once, the message goes out when the event is done."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import radixkv


@pytest.fixture
def seq(pool: Any, ns: Any) -> Any:
    seq = pool.reserve(range(16), namespace=ns)
    yield seq
    seq.free()


def cached(pool: Any, ns: Any) -> int:
    return pool.lookup(range(16), namespace=ns).device_tokens


def test_nothing_is_published_before_the_event(pool: Any, ns: Any, seq: Any, new_fence: Any) -> None:
    fence = new_fence()
    seq.commit(8, after=fence)
    assert (cached(pool, ns), seq.committed_tokens) == (0, 0)
    fence.done = True
    assert cached(pool, ns) == 8  # it went out ahead of this very lookup
    assert (seq.committed_tokens, fence.synchronized) == (8, 0)


def test_the_heartbeat_takes_it_along_when_nobody_calls(seq: Any, new_fence: Any, wait_until: Any) -> None:
    fence = new_fence()
    seq.commit(8, after=fence)
    fence.done = True
    wait_until(lambda: seq.committed_tokens == 8, what="the fenced commit")


def test_in_order_per_sequence(pool: Any, ns: Any, seq: Any, new_fence: Any) -> None:
    first, second = new_fence(), new_fence()
    seq.commit(4, after=first)
    seq.commit(12, after=second)
    second.done = True
    assert cached(pool, ns) == 0
    first.done = True
    assert cached(pool, ns) == 12


def test_flush_waits_for_all(pool: Any, ns: Any, seq: Any, new_fence: Any) -> None:
    fences = [new_fence() for _ in range(3)]
    for n, fence in enumerate(fences):
        seq.commit(4 * n + 4, after=fence)
    timer = threading.Timer(0.05, lambda: [setattr(fence, "done", True) for fence in fences])
    timer.start()
    pool.flush(30)
    timer.join()
    assert (cached(pool, ns), seq.committed_tokens) == (12, 12)


def test_flush_without_timeout_synchronizes(pool: Any, ns: Any, seq: Any, new_fence: Any) -> None:
    fence = new_fence()
    seq.commit(8, after=fence)
    pool.flush()
    assert (cached(pool, ns), fence.done) == (8, True)


def test_flush_gives_up_after_its_timeout(pool: Any, seq: Any, new_fence: Any) -> None:
    fence = new_fence()
    seq.commit(8, after=fence)
    with pytest.raises(radixkv.Timeout):
        pool.flush(0.05)
    assert isinstance(radixkv.Timeout(), TimeoutError)
    fence.done = True
    pool.flush(5)


def test_flush_raises_deferred_errors(pool: Any, seq: Any, new_fence: Any) -> None:
    seq.commit(17, after=new_fence())
    with pytest.raises(radixkv.BadRequest):
        pool.flush()
    pool.flush()


def test_a_deferred_error_surfaces_at_the_sequences_next_call(pool: Any, ns: Any, seq: Any, new_fence: Any) -> None:
    fence = new_fence()
    seq.commit(17, after=fence)
    fence.done = True
    assert cached(pool, ns) == 0
    with pytest.raises(radixkv.BadRequest):
        seq.extend([1])
    seq.extend([1])
    assert seq.length == 17


def test_extend_and_share_are_not_held_back_by_a_commit(pool: Any, seq: Any, new_fence: Any) -> None:
    fence = new_fence()
    seq.commit(8, after=fence)
    seq.extend([1], headroom_tokens=1)
    assert seq.length == 17
    (child,) = seq.share()
    assert child.length == 0
    child.free()
    assert fence.synchronized == 0
    fence.done = True


def test_extend_sees_what_a_pending_truncate_leaves(pool: Any, seq: Any, new_fence: Any) -> None:
    fence = new_fence()
    seq.truncate(5, after=fence)
    assert seq.length == 16
    seq.extend([1, 2])
    assert fence.synchronized == 1
    assert seq.tokens.tolist() == [0, 1, 2, 3, 4, 1, 2]
    assert seq.valid()


def test_free_behind_a_pending_commit(pool: Any, ns: Any, new_fence: Any, counts: Any) -> None:
    seq, fence = pool.reserve(range(16), namespace=ns), new_fence()
    seq.commit(16, after=fence)
    seq.free()
    with pytest.raises(radixkv.StaleHandle):
        seq.commit(16)
    assert counts()["sequences"] == 1
    fence.done = True
    assert cached(pool, ns) == 16
    pool.flush(5)
    assert counts()["sequences"] == 0


def test_pages_are_given_up_only_after_the_event(pool: Any, ns: Any, new_fence: Any, counts: Any) -> None:
    seq, fence = pool.reserve(range(16), namespace=ns), new_fence()
    seq.free(after=fence)
    seq.free()
    assert counts()["private"] == 4
    fence.done = True
    pool.flush(5)
    assert counts()["private"] == 0


def test_handoff_after_an_event(pool: Any, connect: Any, ns: Any, new_fence: Any) -> None:
    seq, fence = pool.reserve(range(16), namespace=ns), new_fence()
    ticket = seq.handoff(after=fence)
    other = connect().pool("default")
    with pytest.raises(radixkv.StaleHandle):
        other.adopt(ticket)
    fence.done = True
    pool.flush(5)
    with other.adopt(ticket) as mine:
        assert mine.length == 16


def test_handoff_takes_pending_commits_along(pool: Any, ns: Any, new_fence: Any, connect: Any) -> None:
    seq, fence = pool.reserve(range(16), namespace=ns), new_fence()
    seq.commit(12, after=fence)
    ticket = seq.handoff()
    assert fence.done
    with connect().pool("default").adopt(ticket) as mine:
        assert mine.committed_tokens == 12


@pytest.mark.parametrize("mine", [None, "pending", "done"])
def test_handoff_while_a_forks_free_waits_for_its_event(
    pool: Any, connect: Any, ns: Any, new_fence: Any, mine: str | None
) -> None:
    """The library has copied the fork's rows: nobody waits for the fork's event."""
    seq, fence, own = pool.reserve(range(10), namespace=ns), new_fence(), new_fence(done=mine == "done")
    seq.commit(10)
    (child,) = seq.share()
    child.free(after=fence)
    ticket = seq.handoff(after=own if mine else None)
    own.done = True
    there = connect().pool("default")
    pool.lookup([1], namespace=ns)  # takes along what is ready
    with there.adopt(ticket) as moved:
        assert (moved.length, moved.committed_tokens, moved.valid()) == (10, 10, True)
    assert fence.synchronized == 0
    fence.done = True
    pool.flush(5)


def test_handoff_waits_for_rows_that_the_caller_still_copies_from_it(
    pool: Any, connect: Any, ns: Any, new_fence: Any
) -> None:
    seq, fence = pool.reserve(range(10), namespace=ns), new_fence()
    seq.commit(10)
    (child,) = seq.share(copy=False)
    with pytest.raises(radixkv.BadRequest, match="copied"):
        seq.handoff()
    child.free(after=fence)
    ticket = seq.handoff()
    assert fence.synchronized == 1
    connect().pool("default").adopt(ticket).free()


def test_copied_after_an_event(pool: Any, ns: Any, new_fence: Any, cache: Any, counts: Any) -> None:
    prompt = cache(8)
    fence = new_fence()
    with pool.reserve(prompt, namespace=ns, copy=False) as seq:
        held = counts()["evictable"]
        seq.copied(after=fence)
        assert (counts()["evictable"], len(seq.copy_rows)) == (held, 1)
        fence.done = True
        pool.flush(5)
        assert (counts()["evictable"], seq.copy_rows) == (held + 1, [])


def test_a_client_that_closes_with_unfinished_work_leaves_its_pages_to_nobody(
    daemon: Any, client: Any, ns: Any, new_fence: Any, counts: Any, wait_until: Any
) -> None:
    """A device may still write to them: as long as this process maps the arena they are quarantined."""
    other = radixkv.connect(daemon.endpoint)
    before = counts("half")["quarantined"]
    pool = other.pool("half")
    seq = pool.reserve(range(8), namespace=ns)
    seq.free(after=new_fence())
    other.close()
    wait_until(lambda: counts("half")["sequences"] == 0, what="the end of the session")
    assert counts("half")["quarantined"] == before + 2


def test_a_client_that_closes_waits_a_moment_for_what_is_nearly_done(
    daemon: Any, client: Any, ns: Any, new_fence: Any, counts: Any
) -> None:
    other = radixkv.connect(daemon.endpoint)
    before = counts("half")
    fence = new_fence()
    other.pool("half").reserve(range(8), namespace=ns).free(after=fence)
    threading.Timer(0.1, setattr, (fence, "done", True)).start()
    other.close()
    assert counts("half") == before
