"""radixkv's engine: an admission is two commands (reserve; commit and free), made beforehand, of packed tokens.

With ``three`` as its argument it is three, a command for each verb.
"""

from __future__ import annotations

import sys

from bench import workload
from bench.core import Admission, Core
from bench.peers.worker import Work, serve
from radixkv.version import VERSION


def convert(tokens: workload.Tokens) -> bytes:
    return tokens.tobytes()


def admission(core: Core, tokens: bytes) -> Admission:
    return core.admission_in_three(tokens) if sys.argv[1:] == ["three"] else core.admission(tokens)


def churn(work: workload.Churn) -> Work:
    core = Core(work.pool_pages)
    requests = map(convert, workload.stream(work))
    for _ in range(work.fill):
        core.admit(next(requests))
    return Work(core.carry_out, (admission(core, tokens) for tokens in requests))


def build() -> dict[str, Work]:
    tree = workload.tree()
    core = Core(workload.TREE_POOL_PAGES)
    core.admit_all(tree.admissions())
    if core.admit(convert(tree.long[0])) != workload.LONG_TOKENS - 1:
        raise RuntimeError("a sequence that was admitted should be cached, but for the token left to compute")
    w3 = Work(core.carry_out, (admission(core, convert(tokens)) for tokens in tree.half_cached()))
    return {"W3": w3, "W4": churn(workload.W4), "W4b": churn(workload.W4B)}


if __name__ == "__main__":
    serve(VERSION, build)
