"""Processes of a group that do what they are told by a pipe: rank 0 with a client, the others attached."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

import radixkv
from tests.conftest import DEVICE

if DEVICE != "cpu":
    import tests.cuda.on_fake  # noqa: F401 - arenas are read and written by their address


def live(endpoint: str, group: bytes | None, rank: int, pipe: Connection) -> None:
    """Send what each command gave, or the code of its error."""
    worker = First(endpoint) if group is None else Further(endpoint, group, rank)
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(getattr(worker, name)(*arguments))
        except radixkv.RadixKVError as error:
            pipe.send(error.code)


class Process:
    """What all ranks can: write and read a number in their own arena."""

    pool: Any

    def write(self, page: int, value: float) -> None:
        for layer in range(self.pool.spec.layers):
            self.pool.keys(layer)[page] = value
            self.pool.values(layer)[page] = -value

    def read(self, page: int) -> list[float]:
        """Every number that is in the page's keys and, with its sign turned, in its values."""
        layers = range(self.pool.spec.layers)
        found = {float(number) for layer in layers for number in self.pool.keys(layer)[page].flatten()}
        found |= {-float(number) for layer in layers for number in self.pool.values(layer)[page].flatten()}
        return sorted(found)

    def copy_rows(self, rows: list[tuple[int, int, int]]) -> None:
        self.pool.copy_rows(rows)

    def fork(self) -> int:
        """A child that uses what it inherited: how it ended."""
        child = os.fork()
        if child == 0:
            try:
                self.read(0)
            except radixkv.Forked:
                os._exit(7)
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class First(Process):
    def __init__(self, endpoint: str) -> None:
        self.client = radixkv.connect(endpoint)
        self.pool = self.client.pool("ranked")
        self.seqs: list[Any] = []

    def token(self) -> bytes:
        return self.client.group_token

    def reserve(self, tokens: list[int], namespace: Any) -> list[int]:
        self.seqs.append(self.pool.reserve(tokens, namespace=namespace))
        return self.seqs[-1].page_table.tolist()

    def cached(self) -> int:
        return self.seqs[-1].cached_tokens

    def rows(self) -> list[tuple[int, int, int]]:
        return self.seqs[-1].copy_rows

    def commit(self, n: int) -> None:
        self.seqs[-1].commit(n)

    def free(self) -> None:
        self.seqs.pop().free()

    def valid(self) -> bool:
        return self.seqs[-1].valid()

    def close(self) -> None:
        self.client.close()


class Further(Process):
    def __init__(self, endpoint: str, group: bytes, rank: int) -> None:
        self.member = radixkv.attach(endpoint, group, rank)
        self.pool = self.member.pool("ranked")

    def valid(self) -> bool:
        return self.member.valid()

    def single(self) -> None:
        self.member.pool("single")

    def close(self) -> None:
        self.member.close()
