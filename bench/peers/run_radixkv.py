"""radixkv's engine: an admission is three commands (reserve, commit, free), made beforehand, of packed tokens."""

from __future__ import annotations

from bench import workload
from bench.core import Core
from bench.peers.worker import Work, serve
from radixkv.version import VERSION


def convert(tokens: workload.Tokens) -> bytes:
    return tokens.tobytes()


def churn(work: workload.Churn) -> Work:
    core = Core(work.pool_pages)
    requests = map(convert, workload.stream(work))
    for _ in range(work.fill):
        core.admit(next(requests))
    return Work(core.carry_out, map(core.admission, requests))


def build() -> dict[str, Work]:
    tree = workload.tree()
    core = Core(workload.TREE_POOL_PAGES)
    core.admit_all(tree.admissions())
    if core.admit(convert(tree.long[0])) != workload.LONG_TOKENS - 1:
        raise RuntimeError("a sequence that was admitted should be cached, but for the token left to compute")
    w3 = Work(core.carry_out, map(core.admission, map(convert, tree.half_cached())))
    return {"W3": w3, "W4": churn(workload.W4), "W4b": churn(workload.W4B)}


if __name__ == "__main__":
    serve(VERSION, build)
