"""What the demo asks, and of which document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from radixkv.config import QUANTIZED

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DOCUMENT = EXAMPLES / "harbour-handbook.md"
QUESTIONS = EXAMPLES / "harbour-questions.txt"
QUESTIONS_NEEDED = 9
MAX_NEW_TOKENS = 24
KV_DTYPES = ("float32", *QUANTIZED)
"""What pages may hold: the model's own, or quantized."""
KILL_AFTER_TOKENS = 4
"""So much of an answer has been said when its worker, or the daemon, is killed."""


class BadInput(Exception):
    """The document or the questions cannot be used; the message says why and what would do."""


@dataclass(frozen=True, slots=True)
class Task:
    """A document and nine questions about it, and what the pool's pages hold."""

    document: str
    questions: tuple[str, ...]
    kv_dtype: str = KV_DTYPES[0]


def load(document: Path | None, questions: Sequence[str], kv_dtype: str = KV_DTYPES[0]) -> Task:
    """Read the files; what is not given comes from examples/. Raises BadInput."""
    if kv_dtype not in KV_DTYPES:
        raise BadInput(f"--kv-dtype {kv_dtype} is not allowed; allowed: {', '.join(KV_DTYPES)}")
    path = document or DOCUMENT
    text = _read(path, "--document").strip()
    if not text:
        raise BadInput(f"{path} is empty; give a text with --document")
    asked = tuple(questions)
    if not asked:
        if document is not None:
            raise BadInput("a document of your own needs at least one --question")
        asked = tuple(line for line in _read(QUESTIONS, "--question").splitlines() if line.strip())
    rounds = -(-QUESTIONS_NEEDED // len(asked))
    return Task(text, (asked * rounds)[:QUESTIONS_NEEDED], kv_dtype)


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; give another one with {flag}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"cannot read {path}: it is not UTF-8 text; give another one with {flag}") from error
