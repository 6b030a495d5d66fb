"""What the demo prints: a table for people, one object for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from radixkv.demo.verdict import Answer, PageCount


@dataclass(slots=True)
class Kill:
    """what: who was killed. at_s: seconds since the demo began. how: the rest of the sentence, for people."""

    what: str
    at_s: float
    how: str = ""


@dataclass(slots=True)
class Result:
    answers: list[Answer]
    kills: list[Kill]
    counts: list[PageCount]
    boot_ids: list[str]
    faults: list[str]
    seconds: float

    @property
    def saved_tokens(self) -> int:
        return sum(answer.done["cached_tokens"] for answer in self.answers)

    @property
    def saved_seconds(self) -> float:
        """Waiting for first tokens that did not happen, measured in this run."""
        return float(sum(answer.reference["ttft_s"] - answer.done["ttft_s"] for answer in self.answers))


def as_json(result: Result) -> dict[str, Any]:
    return {
        "requests": [_request(answer) for answer in result.answers],
        "kills": [{"what": kill.what, "at_s": round(kill.at_s, 3)} for kill in result.kills],
        "pages": result.counts[-1].states,
        "saved": {"tokens": result.saved_tokens, "seconds": round(result.saved_seconds, 3)},
        "boot_ids": result.boot_ids,
        "ok": not result.faults,
    }


def _request(answer: Answer) -> dict[str, Any]:
    done = answer.done
    return {
        "id": answer.id,
        "worker_pid": answer.pid,
        "prompt_tokens": len(answer.prompt),
        "cached_tokens": done["cached_tokens"],
        "computed_tokens": done["computed_tokens"],
        "page_table_head": done["page_table_head"],
        "ttft_s": round(done["ttft_s"], 4),
        "ttft_uncached_s": round(answer.reference["ttft_s"], 4),
        "output": done["output"],
        "equal": answer.equal,
    }


def show(result: Result, console: Console) -> None:
    console.print(_answers(result.answers))
    console.print(_pages(result.counts))
    for kill in result.kills:
        console.print(f"Killed, {kill.at_s:.1f} s after the start: {kill.what}{kill.how}.", highlight=False)
    asked = sum(len(answer.prompt) for answer in result.answers)
    console.print(
        f"Saved: {result.saved_tokens:,} of {asked:,} prompt tokens were not computed again; "
        f"{result.saved_seconds:.1f} s less waiting for first tokens.",
        highlight=False,
    )
    verdict = "[green]ok[/]" if not result.faults else "[red]not ok[/]"
    console.print(f"Every output equals the one without the cache, no page leaked: {verdict}. {result.seconds:.0f} s.")
    for fault in result.faults:
        console.print(f"  - {fault}", highlight=False, markup=False)


def _answers(answers: list[Answer]) -> Table:
    caption = "with, without: seconds to the first token with the cache and without it; equal: the outputs of both"
    table = Table(title="Different questions about the same document", caption=caption, box=box.SIMPLE_HEAD)
    for heading in ("request", "worker", "prompt\ntokens", "cached\ntokens", "with", "without"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("output", ratio=1)
    table.add_column("equal")
    for answer in answers:
        done = answer.done
        table.add_row(
            answer.id,
            str(answer.worker),
            f"{len(answer.prompt):,}",
            f"{done['cached_tokens']:,}",
            f"{done['ttft_s']:.2f}",
            f"{answer.reference['ttft_s']:.2f}",
            done["output"].strip(),
            "yes" if answer.equal else "NO",
        )
    return table


def _pages(counts: list[PageCount]) -> Table:
    states = [state for state in counts[-1].states if any(count.states.get(state) for count in counts)]
    table = Table(
        title=f"Pages of the pool ({counts[-1].total} in all), as the daemon counts them", box=box.SIMPLE_HEAD
    )
    table.add_column("when")
    for state in states:
        table.add_column(state, justify="right")
    table.add_column("host only", justify="right")
    table.add_column("sequences", justify="right")
    for count in counts:
        on_device = [str(count.states.get(state, 0)) for state in states]
        table.add_row(count.when, *on_device, str(count.host_only), str(count.sequences))
    return table
