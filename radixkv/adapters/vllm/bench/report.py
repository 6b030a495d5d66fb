"""What the bench found, as a table for people and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from radixkv.adapters.vllm.bench.load import Shape
from radixkv.adapters.vllm.bench.run import WAYS, Findings, Measured

HEAD = "| | engine | new document | known document | all at once | cached |\n| --- | --- | ---: | ---: | ---: | ---: |"


def table(shape: Shape, found: Findings) -> str:
    """Markdown. Times are to the first token; in brackets what is against the first engine without a prefix cache."""
    plain = next((row for row in found.rows if (row.way, row.engine) == ("nothing", "first")), None)
    asked = (
        f"{shape.documents} documents of {shape.document_tokens} tokens, {shape.questions} questions of "
        f"{shape.question_tokens} tokens about each, {shape.output_tokens} tokens of output, greedy: first one by one, "
        "then as many about other documents at once."
    )
    lines = [
        asked,
        ", ".join(f"{name} {version}" for name, version in found.versions.items()),
        "",
        HEAD,
        *(_row(row, plain) for row in found.rows),
        *(f"| {WAYS[way]} | does not run: {why} | | | | |" for way, why in found.not_run.items()),
        "",
        *(f"RADIXKV GAVE THE FRESH ENGINE NOTHING: {WAYS[way]}." for way in found.gave_nothing),
        "OUTPUTS DIFFER." if not found.same_outputs else "All outputs are equal." if found.rows else "NOTHING HAS RUN.",
    ]
    return "\n".join(lines)


def as_json(shape: Shape, found: Findings) -> dict[str, Any]:
    rows = [asdict(row) for row in found.rows]
    for row in rows:
        del row["outputs"]
    return {
        "versions": found.versions, "shape": asdict(shape), "rows": rows, "not_run": found.not_run,
        "same_outputs": found.same_outputs, "gave_nothing": found.gave_nothing,
    }  # fmt: skip


def _row(row: Measured, plain: Measured | None) -> str:
    shown = {"new_s": "{:.2f} s", "known_s": "{:.2f} s", "tokens_per_s": "{:,.0f} tokens/s"}
    cells = [f"{row.cached_tokens / row.prompt_tokens:.0%}"]
    for name, form in reversed(shown.items()):
        value = getattr(row, name)
        against = f" ({value / getattr(plain, name):.2f})" if plain else ""
        cells.insert(0, form.format(value) + against)
    return f"| {' | '.join([WAYS[row.way], row.engine, *cells])} |"
