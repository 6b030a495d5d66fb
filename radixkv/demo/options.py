"""What the demo asks, and of which document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DOCUMENT = EXAMPLES / "harbour-handbook.md"
QUESTIONS = EXAMPLES / "harbour-questions.txt"
QUESTIONS_NEEDED = 6


class BadInput(Exception):
    """The document or the questions cannot be used; the message says why and what would do."""


@dataclass(frozen=True, slots=True)
class Options:
    """document: a text file (None: the handbook in examples/). question: asked in this order, again from the first when
    there are fewer than six. json: print one JSON object instead of the table."""

    document: Path | None = None
    question: tuple[str, ...] = ()
    json: bool = False
    max_new_tokens: int = 24


@dataclass(frozen=True, slots=True)
class Task:
    """A document and six questions about it."""

    document: str
    questions: tuple[str, ...]
    max_new_tokens: int


def load(options: Options) -> Task:
    """Read the files. Raises BadInput."""
    if options.max_new_tokens < KILL_AFTER_TOKENS + 1:
        raise BadInput(f"max_new_tokens = {options.max_new_tokens}; allowed: {KILL_AFTER_TOKENS + 1} or more")
    document = _read(options.document or DOCUMENT, "--document").strip()
    if not document:
        raise BadInput(f"{options.document} is empty; give a text with --document")
    questions = options.question
    if not questions:
        if options.document is not None:
            raise BadInput("a document of your own needs at least one --question")
        questions = tuple(line for line in _read(QUESTIONS, "--question").splitlines() if line.strip())
    rounds = -(-QUESTIONS_NEEDED // len(questions))
    return Task(document, (questions * rounds)[:QUESTIONS_NEEDED], options.max_new_tokens)


KILL_AFTER_TOKENS = 4
"""The killed worker has said this much of its answer."""


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}: {error}; give another one with {flag}") from error
