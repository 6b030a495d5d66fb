"""Request traces in the format of Mooncake: a JSON object a line, plain or gzipped.

``timestamp`` (ms) and ``hash_ids`` are read, whatever else is there is not. ``hash_ids`` names the prompt's consecutive
blocks: an equal id at an equal place means an equal prompt up to there. Requests come in the order of their timestamps,
those with the same one as they stand in the file.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from radixkv.errors import ConfigError
from radixkv.types import TOKEN_BYTES

GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Trace:
    """``prompts``: packed block numbers in the order of replay. A number stands for a block as one token would."""

    name: str
    prompts: list[bytes]
    unique_blocks: int

    @property
    def blocks(self) -> int:
        return sum(map(len, self.prompts)) // TOKEN_BYTES

    @property
    def longest(self) -> int:
        """Blocks of the longest prompt: no cache that holds fewer can serve all requests."""
        return max(map(len, self.prompts), default=0) // TOKEN_BYTES


class _Line(msgspec.Struct):
    timestamp: float
    hash_ids: list[int]


def load(path: Path) -> Trace:
    """Read a trace; ids are renumbered densely. Errors: ConfigError names the file and the line."""
    try:
        with path.open("rb") as plain:
            zipped = plain.peek(2)[:2] == GZIP_MAGIC
            lines = list(_lines(path, gzip.GzipFile(fileobj=plain) if zipped else plain))
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    lines.sort(key=lambda line: line.timestamp)
    numbers: dict[int, int] = {}
    prompts = [array("I", [numbers.setdefault(block, len(numbers)) for block in line.hash_ids]) for line in lines]
    return Trace(name_of(path), [p.tobytes() for p in prompts], len(numbers))


def name_of(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def _lines(path: Path, file: Iterable[bytes]) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"trace {str(path)!r}, line {number}: {error}") from None
