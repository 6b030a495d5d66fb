"""The work that radixkv and its peers are timed on, defined once. Needs numpy alone.

::

    TREE    1,000 cached sequences, 206,000 pages of 16 tokens
            20 system prompts of 1,024 tokens; 992 conversations of 4,096 that begin with one of them;
            8 of 32,768 that begin with one, built in 16 turns of 2,048
    W3      admission of 4,096 tokens, the first 2,048 cached, into TREE
    W4      admission of 4,096 tokens, 1,024 of them one of 16 prompts, into a full pool of 100,000 pages
    W4b     the same with 512 and 256 tokens: many leaves

An *admission* is one request's life in an index: match, pin, make room, allocate, publish, unpin. Tokens are uint32
below ``VOCABULARY``, from fixed seeds. Every peer converts them beforehand into the type it likes best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]

PAGE_SIZE = 16
VOCABULARY = 128_000

SYSTEM_PROMPTS = 20
SYSTEM_TOKENS = 1_024
CONVERSATIONS = 992
CONVERSATION_TOKENS = 4_096
LONG_SEQUENCES = 8
LONG_TOKENS = 32_768
TURN_TOKENS = 2_048
TREE_POOL_PAGES = 420_000

W3_CACHED_TOKENS = 2_048


@dataclass(frozen=True)
class Churn:
    """Admissions into a pool that is full: ``fill`` sequences before the clock starts, then timed ones."""

    pool_pages: int
    prompts: int
    shared_tokens: int
    tokens: int
    fill: int
    seed: int

    @property
    def new_pages(self) -> int:
        """Pages one admission takes beyond the shared prompt, which stays cached by its use."""
        return (self.tokens - self.shared_tokens) // PAGE_SIZE


W4 = Churn(pool_pages=100_000, prompts=16, shared_tokens=1_024, tokens=4_096, fill=700, seed=77)
W4B = Churn(pool_pages=100_000, prompts=16, shared_tokens=256, tokens=512, fill=7_000, seed=78)


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def fresh(source: np.random.Generator, tokens: int) -> Tokens:
    """Tokens nobody has seen: ``tokens`` of them, drawn uniformly."""
    return source.integers(0, VOCABULARY, tokens, dtype=np.uint32)


@dataclass(frozen=True)
class Tree:
    """The sequences of TREE. ``long`` ones are admitted turn by turn (``turns`` gives their lengths)."""

    conversations: list[Tokens]
    long: list[Tokens]

    @property
    def turns(self) -> range:
        return range(TURN_TOKENS, LONG_TOKENS + 1, TURN_TOKENS)

    def admissions(self) -> Iterator[Tokens]:
        """Everything that is admitted to build TREE, in order."""
        yield from self.conversations
        for sequence in self.long:
            for length in self.turns:
                yield sequence[:length]

    def half_cached(self, seed: int = 3) -> Iterator[Tokens]:
        """W3, without end: the first 2,048 tokens of one cached conversation after the other, then 2,048 new ones."""
        source = generator(seed)
        for conversation in cycle(self.conversations):
            new = fresh(source, CONVERSATION_TOKENS - W3_CACHED_TOKENS)
            yield np.concatenate([conversation[:W3_CACHED_TOKENS], new])


def tree(seed: int = 1234) -> Tree:
    source = generator(seed)
    prompts = [fresh(source, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]

    def beginning_with(i: int, tokens: int) -> Tokens:
        return np.concatenate([prompts[i % SYSTEM_PROMPTS], fresh(source, tokens - SYSTEM_TOKENS)])

    return Tree(
        conversations=[beginning_with(i, CONVERSATION_TOKENS) for i in range(CONVERSATIONS)],
        long=[beginning_with(i, LONG_TOKENS) for i in range(LONG_SEQUENCES)],
    )


def stream(churn: Churn) -> Iterator[Tokens]:
    """Sequences of a churn, without end: one of its prompts, drawn uniformly, then tokens nobody has seen."""
    source = generator(churn.seed)
    prompts = [fresh(source, churn.shared_tokens) for _ in range(churn.prompts)]
    while True:
        prompt = prompts[int(source.integers(churn.prompts))]
        yield np.concatenate([prompt, fresh(source, churn.tokens - churn.shared_tokens)])


def forks(sequence: Tokens, edges: int, source: np.random.Generator) -> list[Tokens]:
    """Sequences that make the path of ``sequence`` exactly ``edges`` edges, of equal length.

    A path is cut where another sequence leaves it: each fork follows it to one of the inner boundaries and goes on with
    one page of its own.
    """
    step = len(sequence) // edges // PAGE_SIZE * PAGE_SIZE
    return [np.concatenate([sequence[: i * step], fresh(source, PAGE_SIZE)]) for i in range(1, edges)]
