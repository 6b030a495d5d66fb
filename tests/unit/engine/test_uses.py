"""How often a page was used, as LFU counts it: once for each sequence that lets go of it, in whatever way.

Every step is also compared with the naive model (``EnginePair``), marks of all pages among them.
"""

import pytest

from fuzz.model.packing import unpack_pages
from fuzz.pairs.worker import Worker, small_pair

P = list(range(1, 13))
"""Three pages."""


@pytest.fixture(params=["lfu", "s3fifo"])
def worker(request):
    return Worker(small_pair(32, policy=request.param))


def uses(worker, tokens):
    """Of the cached pages of a prompt. S3-FIFO does not count the one that computed it."""
    pool = worker.pair.real.pools["a"]
    namespace = pool.namespaces.find(b"model")
    pages = worker.pair.model.state.pools["a"].match(b"model", tokens)
    marks = {}
    stack = [namespace.root]
    while stack:
        node = stack.pop()
        marks.update(dict.fromkeys(unpack_pages(bytes(node.pages)), node.mark))
        stack += (node.children or {}).values()
    counted = [marks[page] for page in pages]
    return [mark[-1] + (pool.config.policy == "s3fifo") if mark else 0 for mark in counted]


def test_each_request_counts_once(worker):
    worker.cache(P)
    worker.cache(P[:8] + [77] * 4)
    assert (uses(worker, P), uses(worker, P[:8] + [77] * 4)) == ([2, 2, 1], [2, 2, 1])


def test_two_at_once_count_twice(worker):
    worker.cache(P)
    first, second = worker.reserve([*P, 99]), worker.reserve([*P, 99])
    worker.free(first)
    assert uses(worker, P) == [2, 2, 2]
    worker.free(second)
    assert uses(worker, P) == [3, 3, 3]


def test_the_source_of_copy_rows_counts_like_any_page(worker):
    worker.cache(P)
    worker.free(worker.reserve(P))  # not computed: the path reaches over the source to the end
    assert uses(worker, P) == [2, 2, 2]
    held = worker.reserve(P)
    worker.commit(held, 11)  # copied: the source is let go, the others are not
    assert uses(worker, P) == [2, 2, 3]
    worker.free(held)
    assert uses(worker, P) == [3, 3, 3]


def test_a_source_that_was_private_when_the_fork_began(worker):
    parent = worker.reserve(P)
    worker.commit(parent, 10)
    copied, closed, _still = worker.fork(parent, count=3)
    worker.commit(parent, 12)  # now the source is in the tree, held by a second pin of each child
    worker.step(copied=[copied.seq])
    assert uses(worker, P) == [0, 0, 1]
    worker.free(closed)  # its own two pages and the source, each once, as one path
    assert uses(worker, P) == [1, 1, 2]
    worker.free(copied)
    worker.free(parent)
    assert uses(worker, P) == [3, 3, 3]


def test_a_child_that_computes_what_the_source_says(worker):
    parent = worker.reserve(P)
    worker.commit(parent, 10)
    (child,) = worker.fork(parent)
    worker.commit(parent, 12)
    worker.extend(child, [*P[10:], 20, 21, 22, 23])
    worker.commit(child, 16)  # the same page, and one behind it: its path grows over the source, which is not let go
    assert uses(worker, P) == [0, 0, 0]
    worker.free(child)
    worker.free(parent)
    assert uses(worker, [*P, 20, 21, 22, 23]) == [2, 2, 2, 1]


def test_a_child_that_goes_on_otherwise_than_the_source(worker):
    parent = worker.reserve(P)
    worker.commit(parent, 10)
    (child,) = worker.fork(parent)
    worker.commit(parent, 12)
    worker.extend(child, [70, 71])
    worker.commit(child, 12)  # its path goes beside the source, which is let go
    assert uses(worker, P) == [0, 0, 1]
    worker.free(child)
    worker.free(parent)
    assert (uses(worker, P), uses(worker, [*P[:10], 70, 71])) == ([2, 2, 2], [2, 2, 1])


def test_truncating_counts_what_it_gives_up_once(worker):
    worker.cache(P)
    held = worker.reserve(P)  # the path is one page longer than the shared ones
    worker.truncate(held, 3)
    assert uses(worker, P) == [1, 2, 2]  # of the first page rows are copied: it is held
    worker.free(held)
    assert uses(worker, P) == [2, 2, 2]


def test_truncating_gives_up_new_pages_as_one_path():
    """Pages in the tree that nobody has let go yet: with S3-FIFO they enter the queue together."""
    worker = Worker(small_pair(32, policy="s3fifo"))
    worker.compute(P)
    held = worker.reserve(P)
    worker.truncate(held, 4)
    pool = worker.pair.real.pools["a"]
    marks = {node.mark for node in pool.namespaces.find(b"model").root.children.values()}
    assert marks == {()}
    assert pool.order._came == 2
