"""reserve(wait_loaded=False): a sequence is there before its pages are. The copier stands still until it is let go."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import radixkv
from tests.integration.test_host_tier import copier_of, stop_process

PAGES, SIZE = 12, 4
PROMPT = list(range(16))
"""Four pages."""


@pytest.fixture(scope="module")
def daemon(daemon_factory: Callable[..., Any]) -> Any:
    return daemon_factory(
        pools=[{"name": "default", "pages": PAGES, "host_pages": 40, "reclaim_pages": 0, "layers": 3}]
    )


@pytest.fixture
def pool(pool: Any, ns: Any) -> Any:
    """Its PROMPT is in the host tier alone, all its pages are free."""
    with pool.reserve(PROMPT, namespace=ns) as seq:
        seq.commit(16)
    filler = radixkv.Namespace("filler")
    pool.reserve(range(PAGES * SIZE), namespace=filler).free()
    assert pool.lookup(PROMPT, namespace=ns).host_tokens == 16
    return pool


class Copier:
    def __init__(self, pid: int) -> None:
        self._pid = pid

    def go(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


@pytest.fixture
def copier(daemon: Any, pool: Any, wait_until: Any) -> Iterator[Copier]:
    """It stands still."""
    pid = copier_of(daemon)
    stop_process(pid, wait_until)
    yield Copier(pid)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: pool.client.stats().pools["default"].copies == 0, what="the end of all copies")


@pytest.fixture
def early(pool: Any, ns: Any, copier: Copier) -> Iterator[Any]:
    with pool.reserve([*PROMPT, 99], namespace=ns, wait_loaded=False) as seq:
        yield seq


def test_which_pages_are_loading_is_said_until_they_are_there(pool: Any, early: Any, copier: Copier) -> None:
    assert early.loading == (0, 1, 2, 3)
    assert (early.cached_tokens, early.writable_from_tokens, len(early.page_table)) == (16, 16, 5)
    assert early.valid()
    with pytest.raises(radixkv.Timeout):
        early.wait_loaded(timeout_s=0.05)
    with pytest.raises(radixkv.Timeout):
        early.wait_loaded(0, timeout_s=0.05)
    early.extend([7], headroom_tokens=SIZE)
    assert early.loading == (0, 1, 2, 3)
    copier.go()
    early.wait_loaded(2)
    early.wait_loaded()
    assert early.loading == () and early.valid()
    early.wait_loaded(timeout_s=0.0)
    early.commit(18)
    assert early.loading == ()


def test_a_layer_that_does_not_exist_is_refused(early: Any) -> None:
    for layer in (3, -1, "all"):
        with pytest.raises(radixkv.BadRequest):
            early.wait_loaded(layer)


@pytest.mark.parametrize("verb", ["commit", "truncate", "share", "handoff", "step", "free", "fenced"])
def test_what_publishes_or_passes_pages_waits_for_them(
    pool: Any, ns: Any, early: Any, copier: Copier, verb: str, new_fence: Any, wait_until: Any
) -> None:
    verbs: dict[str, Callable[[], Any]] = {
        "commit": lambda: early.commit(17),
        "truncate": lambda: early.truncate(6),
        "share": lambda: [child.free() for child in early.share(at=9)],
        "handoff": lambda: pool.adopt(early.handoff()).free(),
        "step": lambda: pool.step(commit={early: 17}).errors,
        "free": lambda: early.free(commit=17),
        "fenced": lambda: early.commit(17, after=new_fence(done=True)),
    }
    done: list[Any] = []
    running = threading.Thread(target=lambda: done.append(verbs[verb]()))
    running.start()
    wait_until(lambda: pool.client.stats().queued == 1, what="the wait for the pages")
    assert not done
    copier.go()
    running.join(30.0)
    assert len(done) == 1
    assert verb == "share" or not done[0]
    assert early.loading == ()


def test_freed_while_loading_it_is_over_and_the_prefix_is_cached(
    pool: Any, ns: Any, early: Any, copier: Copier, wait_until: Any
) -> None:
    early.free()
    copier.go()
    wait_until(lambda: pool.lookup(PROMPT, namespace=ns).device_tokens == 16, what="the load's end")


def test_by_default_nobody_is_given_pages_that_are_not_there(pool: Any, ns: Any) -> None:
    with pool.reserve([*PROMPT, 99], namespace=ns) as seq:
        assert (seq.cached_tokens, seq.loading) == (16, ())
        seq.wait_loaded()
        seq.wait_loaded(1)
