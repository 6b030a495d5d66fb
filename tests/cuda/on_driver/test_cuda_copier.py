"""What only a CUDA copier does. The contract that all keep is ``tests/unit/device/test_copier.py``, run as well."""

from __future__ import annotations

import select
from typing import Any

import numpy as np
import pytest

from radixkv.device.copier import ProcessCopier
from radixkv.device.copiers import Copiers
from tests.cuda.suites import Word
from tests.unit.device.test_copier import CudaMemory, Memory, ends, load, save, verdicts

ILLEGAL_ADDRESS, ECC_UNCORRECTABLE = 700, 214


@pytest.fixture
def pool() -> Any:
    memory = CudaMemory((24, 10), ranks=(2, 2))
    yield memory
    memory.close()


def test_an_end_is_told_when_the_device_has_finished_and_not_before(pool: Any, control: Any) -> None:
    pinned, copied = control[Word.REGISTERED], control[Word.COPIES]
    copier = ProcessCopier({"default": pool.tiers})
    control[Word.HOLD] = 1
    copier.submit(save(1, [3, 4, 9], [0, 1, 2]))
    copier.submit(load(2, [5], [6]))
    assert not select.select([copier], [], [], 0.3)[0]
    control[Word.HOLD] = 0
    assert sorted(verdicts(ends(copier, 2))) == [(1, True), (2, True)]
    assert np.array_equal(pool.host[1][[0, 1, 2]], pool.device[1][[3, 4, 9]])
    assert control[Word.REGISTERED] == pinned + 2, "the host arenas of both ranks are pinned"
    assert control[Word.COPIES] == copied + 2 * (2 + 1), "two runs out and one in, on every rank"
    copier.close()


def test_one_context_that_dies_is_one_copier_and_its_pools(pool: Any, control: Any) -> None:
    """Those on other devices, or in the machine's memory, go on and lose nothing."""
    plain = Memory((4, 4))
    copiers = Copiers({"gpu": pool.tiers, "cpu": plain.tiers})
    control[Word.FAIL_IN], control[Word.FAIL_CODE] = 1, ECC_UNCORRECTABLE
    copiers.submit(save(1, [0], [0], "gpu"))
    copiers.submit(save(2, [1], [0], "cpu"))
    assert sorted(verdicts(ends(copiers, 2))) == [(1, False), (2, True)]
    assert (copiers.take_lost(), copiers.take_lost(), copiers.deaths) == (["gpu"], [], 1)
    copiers.submit(save(3, [5], [1], "gpu"))
    assert verdicts(ends(copiers, 1)) == [(3, True)], "another process, another context"
    assert np.array_equal(pool.host[0][1], pool.device[0][5])
    copiers.submit(save(4, [5], [1], "nobody's"))
    assert verdicts(ends(copiers, 1)) == [(4, False)]
    copiers.close()
    plain.close()
