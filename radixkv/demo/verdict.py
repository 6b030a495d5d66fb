"""Whether the demo went as it must: each check is a sentence that is true, or a fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BUSY_STATES = ("private", "shadow", "loading", "saving", "quarantined")
"""Page states that must be empty when nobody holds anything."""
WAIT_MAX_S, WAIT_MAX_SHARE = 1.0, 0.1
"""The first question after the daemon's death has its first token within this time. On a machine so busy that all takes
longer: within this share of the time without the cache."""
DAEMONS = 2


@dataclass(slots=True)
class Answer:
    """One finished request: what the worker said of it (``done``), and the same question answered without radixkv.

    before: prompts that were finished, and so committed, when this one began; beside: those that ran at the same time.
    """

    id: str
    worker: int
    pid: int
    prompt: list[int]
    done: dict[str, Any]
    before: list[list[int]]
    beside: list[list[int]]
    reference: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        """The prompt and what was answered."""
        return [*self.prompt, *self.done["tokens"]]

    @property
    def equal(self) -> bool:
        """Token by token, not only as text."""
        return bool(self.done["tokens"] == self.reference.get("tokens"))


@dataclass(slots=True)
class PageCount:
    """The daemon's own count of the pool's pages at one moment."""

    when: str
    total: int
    states: dict[str, int]
    sequences: int
    host_only: int = 0
    """Pages that the host tier alone has."""
    loaded: int = 0
    """Pages that came back from it, ever."""

    @property
    def busy(self) -> int:
        return sum(self.states.get(state, 0) for state in BUSY_STATES)


def common_prefix(a: list[int], b: list[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def expected_hit(prompt: list[int], others: list[list[int]], page_size: int) -> int:
    """Tokens that must be cached: the longest common prefix with another prompt in full pages, never its last token."""
    longest = max((common_prefix(prompt, other) for other in others), default=0)
    return min(longest // page_size * page_size, len(prompt) - 1)


def faults_of(answer: Answer, page_size: int) -> list[str]:
    done, name = answer.done, f"request {answer.id}"
    faults = []
    if not answer.equal:
        faults.append(f"{name}: {done['output']!r} differs from {answer.reference.get('output')!r} without the cache")
    if not done["shared"]:
        faults.append(f"{name}: was computed in local pages, not in the daemon's")
    if done["cached_tokens"] + done["computed_tokens"] != len(answer.prompt):
        faults.append(f"{name}: cached and computed tokens do not add up to {len(answer.prompt)}")
    if done["recoveries"]:
        faults.append(f"{name}: its pages were lost and computed again, {done['recoveries']} times")
    low = expected_hit(answer.prompt, answer.before, page_size)
    high = expected_hit(answer.prompt, answer.before + answer.beside, page_size)
    if not low <= done["cached_tokens"] <= high:
        faults.append(f"{name}: {done['cached_tokens']} tokens were cached, expected {low} to {high}")
    return faults


def page_faults(counts: list[PageCount]) -> list[str]:
    """Pages are conserved at every count."""
    return [
        f"{count.when}: {sum(count.states.values())} pages are counted, the pool has {count.total}"
        for count in counts
        if sum(count.states.values()) != count.total
    ]


def kill_faults(before: PageCount, after: PageCount) -> list[str]:
    """The killed worker held pages, and all of them came back while the cached ones stayed."""
    faults = []
    if before.busy == 0 or before.sequences == 0:
        faults.append("the worker held no pages when it was killed")
    if after.busy != 0 or after.sequences != 0:
        faults.append(f"after the kill {after.busy} pages and {after.sequences} sequences were still held")
    if after.states.get("cached", 0) < before.states.get("cached", 0):
        faults.append("cached pages were lost with the killed worker")
    return faults


def restart_faults(before: PageCount, after: PageCount, answer: Answer, found_tokens: int, page_size: int) -> list[str]:
    """The daemon died while a worker held pages, and the next one went on with them.

    found_tokens: how much of prompt and answer the next daemon has. The former did not have the end, which was not
    computed yet; so the session went on, was able to publish, and then gave everything back.
    """
    faults = []
    if before.busy == 0 or before.sequences == 0:
        faults.append("the worker held no pages when the daemon was killed")
    if after.busy != 0 or after.sequences != 0:
        faults.append(f"after the daemon's death {after.busy} pages and {after.sequences} sequences were still held")
    if after.states.get("cached", 0) < before.states.get("cached", 0):
        faults.append("cached pages were lost with the daemon")
    computed = len(answer.tokens) - 1  # nobody asked for what follows the last token
    if found_tokens != computed // page_size * page_size:
        faults.append(f"request {answer.id}: of {computed} computed tokens the next daemon has {found_tokens}")
    return faults


def host_faults(away: PageCount, back: PageCount, answer: Answer) -> list[str]:
    """The document had left the device, was loaded from the host tier, and that was quicker than to compute it."""
    faults = []
    if away.states.get("cached", 0) != 0 or away.host_only == 0:
        faults.append(
            f"{away.states.get('cached', 0)} cached pages were still on the device, {away.host_only} had left"
        )
    loaded, cached = back.loaded - away.loaded, answer.done["cached_tokens"]
    if loaded == 0 or cached == 0:
        faults.append(f"request {answer.id}: {loaded} pages were loaded for {cached} cached tokens")
    ttft_s, uncached_s = answer.done["ttft_s"], answer.reference["ttft_s"]
    if ttft_s >= max(WAIT_MAX_S, uncached_s):
        faults.append(f"request {answer.id}: {ttft_s:.2f} s to load the document, {uncached_s:.2f} s to compute it")
    return faults


def wait_faults(answer: Answer) -> list[str]:
    ttft_s, most_s = answer.done["ttft_s"], max(WAIT_MAX_S, WAIT_MAX_SHARE * answer.reference["ttft_s"])
    if ttft_s < most_s:
        return []
    return [f"request {answer.id}: its first token took {ttft_s:.2f} s, must be under {most_s:.2f} s"]


def boot_faults(boot_ids: list[str]) -> list[str]:
    if len(set(boot_ids)) == len(boot_ids) == DAEMONS:
        return []
    return [f"there were {len(set(boot_ids))} daemons, not {DAEMONS}"]


def end_faults(last: PageCount, daemon_exit: int) -> list[str]:
    faults = []
    if last.busy != 0 or last.sequences != 0:
        faults.append(f"{last.busy} pages leaked, {last.sequences} sequences are left")
    if daemon_exit != 0:
        faults.append(f"the daemon ended with {daemon_exit}")
    return faults
