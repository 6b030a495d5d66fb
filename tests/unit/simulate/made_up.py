"""Traces that are in no file."""

from array import array

from radixkv.simulate.trace import Trace


def shared_prefixes(groups: int, prompts: int, shared: int, own: int) -> Trace:
    """A made-up trace: so many groups of prompts of ``shared`` equal and ``own`` different blocks, taking turns.

    With room for all of it the hit rate is (prompts - 1) / prompts * shared / (shared + own).
    """
    numbers = iter(range(2**32))
    heads = [[next(numbers) for _ in range(shared)] for _ in range(groups)]
    made = [array("I", head + [next(numbers) for _ in range(own)]).tobytes() for _ in range(prompts) for head in heads]
    return Trace("shared_prefixes", made, next(numbers))
