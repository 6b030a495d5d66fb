"""bench.copy: figures of copies that failed would be the best of all."""

from __future__ import annotations

import pytest

from bench.copy import arenas, copy_now, ended, while_copying
from radixkv.commands import Copy

NO_SUCH_PAGE = (10**6).to_bytes(4, "little")


def test_a_copy_that_fails_is_no_figure() -> None:
    with arenas(8 * 4096, 4096) as memory:
        copy_now(memory.copier, memory.batch(1, slice(None), to_host=True))
        wrong = Copy(2, "default", NO_SUCH_PAGE, NO_SUCH_PAGE, True)
        with pytest.raises(RuntimeError, match="a copy failed"):
            copy_now(memory.copier, wrong)
        assert ended(memory.copier) == []


def test_what_runs_beside_requests_is_looked_at_too() -> None:
    with arenas(8 * 4096, 4096) as memory:
        memory.order[3] = 10**6
        with pytest.raises(RuntimeError, match="a copy failed"):
            while_copying(memory, lambda _: None)
