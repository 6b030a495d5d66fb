"""The kernels against attention by its definition: the torch reference, and Triton's in its interpreter.

Triton decides when it is first imported whether it interprets, so this target says so before.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter


class KernelsTarget:
    """One random problem a step."""

    def __init__(self, rng: random.Random) -> None:
        if "triton" not in sys.modules:
            os.environ["TRITON_INTERPRET"] = "1"
        self.events: Counter[str] = Counter()
        self._rng = rng

    def step(self) -> None:
        from bench.kernel_cases import assert_near
        from bench.kernel_problems import Problem
        from radixkv.kernels import attention_launch

        if not attention_launch.INTERPRETED:
            raise RuntimeError("Triton was imported before it was told to interpret")
        problem = Problem.of(self._rng.randrange(2**32))
        wanted = problem.wanted()
        for impl in ("torch", "triton"):
            try:
                assert_near(problem.got(impl), wanted, problem.shape.dtype)
            except AssertionError as difference:
                raise AssertionError(f"{impl} differs: {problem}: {difference}") from difference
        self.events[problem.kind] += 1
        for name in problem.terms:
            self.events[name] += 1
