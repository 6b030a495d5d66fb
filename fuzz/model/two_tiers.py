"""Two tiers of pages, naively: a dict of prompts' beginnings a tier. One prompt after the other, nothing in between.

A page is the tuple of all tokens up to its end. What is needed comes to the device; what has to leave the device goes
to the host tier, and what is too much there is gone: each time what was let go of longest ago, and of one prompt the
end before the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence

Page = tuple[int, ...]


class TwoTierLRU:
    def __init__(self, device_pages: int, host_pages: int, page_size: int) -> None:
        self._sizes = device_pages, host_pages, page_size
        self.device: dict[Page, int] = {}
        """Each page and when it was let go of last."""
        self.host: dict[Page, int] = {}
        self._time = 0
        self.lost = 0
        """Pages that were in neither tier any more."""

    def prompt(self, tokens: Sequence[int]) -> tuple[int, int]:
        """One that fits the device is computed and let go of. Returns how many pages were there, on each tier."""
        device_pages, host_pages, size = self._sizes
        path = [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]
        here = _leading(path, self.device)
        there = _leading(path[here:], self.host)
        held = path[: here + there]
        for page in path[here : here + there]:
            del self.host[page]
        short = -(-len(tokens) // size) - here - (device_pages - len(self.device))
        for page in sorted(self.device.keys() - held, key=lambda page: _rank(page, self.device))[: max(0, short)]:
            self.host[page] = self.device.pop(page)
        while len(self.host) > host_pages:
            del self.host[min(self.host, key=lambda page: _rank(page, self.host))]
            self.lost += 1
        self._time += 1
        self.device |= dict.fromkeys(path, self._time)
        return here, there


def _rank(page: Page, tier: dict[Page, int]) -> tuple[int, int]:
    return tier[page], -len(page)


def _leading(path: list[Page], tier: dict[Page, int]) -> int:
    return next((at for at, page in enumerate(path) if page not in tier), len(path))
