"""Pages as a dict of words, with each allowed change written out: what the allocator must agree with."""

from __future__ import annotations

from collections import Counter

ALLOWED = {
    ("FREE", "TAKE"): "PRIVATE",
    ("PRIVATE", "PUBLISH"): "CACHED",
    ("PRIVATE", "SHADE"): "SHADOW",
    ("PRIVATE", "RELEASE"): "FREE",
    ("SHADOW", "RELEASE"): "FREE",
    ("CACHED", "EVICT"): "FREE",
    ("CACHED", "REUSE"): "PRIVATE",
    ("PRIVATE", "QUARANTINE"): "QUARANTINED",
    ("SHADOW", "QUARANTINE"): "QUARANTINED",
    ("LOADING", "QUARANTINE"): "QUARANTINED",
    ("SAVING", "QUARANTINE"): "QUARANTINED",
    ("QUARANTINED", "CLEAR"): "FREE",
    ("QUARANTINED", "CLAIM"): "PRIVATE",
    ("QUARANTINED", "CLAIM_SHADOW"): "SHADOW",
    ("FREE", "LOAD"): "LOADING",
    ("LOADING", "LOADED"): "CACHED",
    ("LOADING", "ABANDON"): "FREE",
    ("LOADING", "SHADE"): "SHADOW",
    ("CACHED", "SAVE"): "SAVING",
    ("SAVING", "SAVED"): "CACHED",
}
STATES = ("FREE", "PRIVATE", "CACHED", "SHADOW", "LOADING", "SAVING", "QUARANTINED")
EVENTS = sorted({event for _, event in ALLOWED})


class AllocatorModel:
    """``state`` of every page, ``holders`` of every page that is private or shadow."""

    def __init__(self, pages: int) -> None:
        self.state = dict.fromkeys(range(pages), "FREE")
        self.holders: dict[int, int] = {}

    def counts(self) -> dict[str, int]:
        found = Counter(self.state.values())
        return {state: found[state] for state in STATES}

    def pages(self, state: str) -> list[int]:
        return [page for page, now in self.state.items() if now == state]

    def can(self, pages: list[int], state: str, event: str) -> bool:
        """Whether ``event`` may happen to all these pages, said to be in ``state``."""
        distinct = len(set(pages)) == len(pages)
        return (state, event) in ALLOWED and distinct and all(self.state[page] == state for page in pages)

    def move(self, pages: list[int], state: str, event: str) -> None:
        for page in pages:
            self.state[page] = ALLOWED[state, event]
            if event == "TAKE" or (state == "LOADING" and event == "SHADE"):
                self.holders[page] = 1
            elif self.state[page] not in ("PRIVATE", "SHADOW"):
                self.holders.pop(page, None)
