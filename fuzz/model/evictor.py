"""Recency as a list, oldest first."""

from __future__ import annotations


class RecencyModel:
    def __init__(self) -> None:
        self.order: list[int] = []

    def add(self, key: int) -> None:
        self.order = [other for other in self.order if other != key] + [key]

    def remove(self, key: int) -> None:
        self.order.remove(key)

    def front(self) -> int:
        return self.order[0]
