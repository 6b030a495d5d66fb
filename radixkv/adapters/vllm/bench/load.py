"""The requests: long documents, each with short questions behind it. Token ids are drawn from a seed.

Two halves with documents of their own. ``one_by_one`` is asked one request after the other, the documents in turns:
the first question about a document shows what it costs to see it for the first time, the later ones what it costs
when it is known. ``at_once`` is handed over in one go: throughput.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

TOKEN_IDS = range(100, 40000)


@dataclass(frozen=True, slots=True)
class Shape:
    """tokens of a document and of a question; how many documents a half has, and questions a document."""

    document_tokens: int = 512
    question_tokens: int = 24
    documents: int = 2
    questions: int = 4
    output_tokens: int = 8
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts. Of ``one_by_one`` the first ``shape.documents`` are the first ones about their documents."""

    shape: Shape
    warm_up: list[int]
    one_by_one: list[list[int]]
    at_once: list[list[int]]


def make(shape: Shape) -> Load:
    generator = random.Random(shape.seed)  # noqa: S311 - a load that can be repeated

    def draw(tokens: int) -> list[int]:
        return [generator.choice(TOKEN_IDS) for _ in range(tokens)]

    def half() -> list[list[int]]:
        documents = [draw(shape.document_tokens) for _ in range(shape.documents)]
        return [document + draw(shape.question_tokens) for _ in range(shape.questions) for document in documents]

    return Load(shape, draw(2 * shape.question_tokens), half(), half())
