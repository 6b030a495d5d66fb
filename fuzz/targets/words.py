"""Random prompts that meet each other: few tokens, few different pages, and continuations of what was there before."""

from __future__ import annotations

import random


class Words:
    """Draws prompts. ``alphabet`` tokens make up ``variety`` pages, which make up most prompts."""

    def __init__(self, rng: random.Random, page_size: int, most_pages: int) -> None:
        self._rng = rng
        self._size = page_size
        self._most = most_pages
        alphabet = rng.sample([0, 1, 2, 7, 2**31, 2**32 - 1], rng.randint(1, 3))
        self._alphabet = alphabet
        self._pages = [rng.choices(alphabet, k=page_size) for _ in range(rng.randint(1, 4))]
        self._seen: list[list[int]] = []

    def pages(self, count: int) -> list[int]:
        """``count`` full pages."""
        return [token for _ in range(count) for token in self._rng.choice(self._pages)]

    def tail(self) -> list[int]:
        """Less than a page."""
        return self._rng.choices(self._alphabet, k=self._rng.randrange(self._size))

    def prompt(self) -> list[int]:
        """Something new, something seen, or something seen with another end."""
        rng = self._rng
        start: list[int] = []
        if self._seen and rng.random() < 0.7:
            start = rng.choice(self._seen)
            if rng.random() < 0.5:
                start = start[: rng.randint(0, len(start))]
        more = rng.choice((0, 0, 1, 2, rng.randint(0, self._most)))
        prompt = start + self.pages(more) + (self.tail() if rng.random() < 0.5 else [])
        prompt = prompt[: max(1, self._most) * self._size]
        self._seen = [*self._seen[-30:], prompt]
        return prompt
