"""What a worker's device does: rows are written one after the other, much later than the call that began it, by a page
table that may be old by then. It goes on while the process is stopped, and with its heirs when it is dead."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuzz.simulator.contents import Arena
from fuzz.simulator.sequence import Sequence

if TYPE_CHECKING:
    from fuzz.simulator.client import Client


@dataclass(eq=False)
class Job:
    """Rows to be written; also a fence (``client.outbox.Event``)."""

    arena: Arena
    rows: list[tuple[int, int, int]]
    """(page, row, path) still to be written."""
    until: int
    """How many tokens of the sequence are complete when it is done."""
    who: str
    seq: Sequence | None = None
    """None: an heir's, who does not stop as long as he lives."""

    def query(self) -> bool:
        return not self.rows

    def synchronize(self) -> None:
        assert not self.rows


def work_on(jobs: list[Job], rng: random.Random) -> None:
    """A few rows of one of them."""
    job = rng.choice(jobs)
    for page, row, path in job.rows[: rng.choice((1, 2, 8))]:
        job.arena.write(page, row, path, job.who)
        del job.rows[0]
        if job.seq is None:
            job.rows.append((page, row, path))
    if not job.rows:
        jobs.remove(job)
        if job.seq is not None:
            job.seq.written, job.seq.job = max(job.seq.written, job.until), None


def strays(client: Client) -> list[Job]:
    """What an heir may do: write anything wherever its parent might still have written, but for what it committed."""
    jobs = []
    for pool in client.pools:
        for seq in pool.sequences:
            size, table = seq.memory.spec.page_size, seq.page_table
            free = range(max(seq.asked, seq.writable_from_tokens), len(table) * size)
            garbage = [(int(table[at // size]), at % size, -client.process.number) for at in free]
            certain = not (seq.busy or seq.unsettled or seq.doubtful or client.core.outbox.truncates(seq))
            if garbage and certain and seq.intact():
                jobs.append(Job(seq.memory.arena, garbage, 0, f"an heir of {client.name}"))
    return jobs
