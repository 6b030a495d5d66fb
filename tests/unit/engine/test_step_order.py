"""One step: copied, free, truncate, commit, extend, share, whatever order the lists have in the message."""

from fuzz.model.packing import pack_tokens, unpack_pages
from fuzz.pairs.worker import code, counts, workers
from radixkv import commands


def test_a_commit_does_not_see_the_extend_behind_it():
    _, one = workers(8, 1)
    held = one.reserve(range(4), headroom=4)
    done = one.step(commit=[commands.Commit(held.seq, 6)], extend=[commands.Extend(held.seq, pack_tokens([4, 5]), 0)])
    assert code(done.commit[0]) == "bad_request" and done.extend == [b""]
    assert one.step(commit=[commands.Commit(held.seq, 6)]).commit == [None]


def test_a_commit_sees_the_truncate_before_it_and_a_share_all_of_them():
    _, one = workers(8, 1)
    held = one.reserve(range(8))
    done = one.step(
        share=[commands.Share(held.seq, None, 1, 90)],
        commit=[commands.Commit(held.seq, 5)],
        truncate=[commands.Truncate(held.seq, 4)],
    )
    assert code(done.commit[0]) == "bad_request" and done.share[0].at == 0
    done = one.step(share=[commands.Share(held.seq, None, 1, 91)], commit=[commands.Commit(held.seq, 4)])
    assert done.commit == [None] and done.share[0].at == 4


def test_what_is_freed_makes_room_for_what_is_extended():
    pair, one = workers(4, 1)
    old, held = one.reserve(range(8)), one.reserve(range(20, 28))
    done = one.step(extend=[commands.Extend(held.seq, b"", 8)], free=[commands.Free(old.seq)])
    assert len(done.extend[0]) == 8 and counts(pair) == {"private": 4}


def test_a_commit_does_not_let_go_of_rows_that_a_truncate_of_the_same_message_announces():
    pair, one, other = workers(3, 2)
    held = one.reserve(range(8))
    one.step(commit=[commands.Commit(held.seq, 8)])
    done = one.step(truncate=[commands.Truncate(held.seq, 6)], commit=[commands.Commit(held.seq, 6)])
    assert done.commit == [None]
    ((source, _, rows),) = done.truncate[0].copy_rows
    assert rows == 2
    prompt = commands.Reserve("a", 90, b"", pack_tokens(range(50, 54)))
    assert code(pair.ask(other.session, prompt)) == "out_of_pages", "nobody can have copied the rows yet"
    assert one.step(commit=[commands.Commit(held.seq, 6)]).commit == [None]
    granted = pair.ask(other.session, commands.Reserve("a", 91, b"", pack_tokens(range(50, 54))))
    assert unpack_pages(granted.page_table) == [source]
