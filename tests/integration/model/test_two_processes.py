"""The real model in two processes: one computes a prompt and another answers; one stands still and loses its pages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import radixkv
from radixkv.adapters import smollm2
from radixkv.adapters.transformers import PagedModel
from radixkv.demo.options import DOCUMENT

pytestmark = pytest.mark.model

POOL = {"layers": 30, "kv_heads": 3, "head_dim": 64, "page_size": 16, "pages": 12}
PROMPT_TOKENS, NEW_TOKENS = 40, 12
STOPS_AFTER = 3

WORKER = """
import json, os, signal, sys
import torch
import radixkv
from pathlib import Path
from radixkv.adapters import smollm2
from radixkv.adapters.transformers import PagedModel

endpoint, folder, stops_after = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
model, _ = smollm2.load(folder)

def say(**what):
    print(json.dumps(what), flush=True)

with radixkv.connect(endpoint) as client:
    paged = PagedModel(model, client.pool(), radixkv.Namespace(**smollm2.namespace_fields()))
    say(ready=os.getpid())

    tokens, new = json.loads(sys.stdin.readline())
    with paged.open(tokens, new) as sequence:
        token = int(sequence.logits().argmax())
        sequence.append(token)
        say(table=sequence.page_table, ticket=sequence.handoff().hex(), token=token)

    tokens, new = json.loads(sys.stdin.readline())
    said = []

    def on_token(token):
        said.append(token)
        if len(said) == stops_after:
            os.kill(os.getpid(), signal.SIGSTOP)

    answer = paged.greedy(tokens, new, on_token=on_token)
    say(tokens=answer.tokens, recoveries=answer.recoveries, shared=answer.shared)
"""


class Worker:
    """A process with a model of its own, told what to do line by line."""

    def __init__(self, endpoint: str, folder: Any) -> None:
        command = [sys.executable, "-c", WORKER, endpoint, str(folder), str(STOPS_AFTER)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def said(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        return said

    def tell(self, *what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()


@pytest.fixture(scope="module")
def daemon(daemon_factory: Any) -> Any:
    return daemon_factory(pools=[POOL], lease_s=1.0, heartbeat_s=0.1)


@pytest.fixture(scope="module")
def worker(daemon: Any, smollm2_files: Any) -> Iterator[Worker]:
    worker = Worker(daemon.endpoint, smollm2_files)
    with worker.process:
        assert worker.said()["ready"] == worker.process.pid
        yield worker
        worker.process.kill()


@pytest.fixture(scope="module")
def client(daemon: Any) -> Iterator[radixkv.Client]:
    with radixkv.connect(daemon.endpoint) as client:
        yield client


@pytest.fixture(scope="module")
def prompt(smollm2_model: Any) -> list[int]:
    _, tokenizer = smollm2_model
    tokens: list[int] = tokenizer(DOCUMENT.read_text())["input_ids"][:PROMPT_TOKENS]
    return tokens


@pytest.fixture(scope="module")
def expected(smollm2_model: Any, prompt: list[int]) -> list[int]:
    """Transformers' own greedy answer, with its own cache."""
    model, _ = smollm2_model
    ids = torch.tensor([prompt])
    settings = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=2)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    tokens: list[int] = output[0, PROMPT_TOKENS:].tolist()
    assert len(tokens) == NEW_TOKENS
    return tokens


@pytest.fixture
def paged(smollm2_model: Any, client: radixkv.Client) -> PagedModel:
    model, _ = smollm2_model
    return PagedModel(model, client.pool(), radixkv.Namespace(**smollm2.namespace_fields()))


def test_one_process_computes_the_prompt_and_another_answers(
    worker: Worker, client: radixkv.Client, paged: PagedModel, prompt: list[int], expected: list[int]
) -> None:
    worker.tell(prompt, NEW_TOKENS)
    given = worker.said()
    answer = [given["token"]]
    with paged.adopt(bytes.fromhex(given["ticket"]), NEW_TOKENS) as sequence:
        assert sequence.page_table == given["table"], "no bytes move"
        while len(answer) < NEW_TOKENS:
            answer.append(int(sequence.logits().argmax()))
            sequence.append(answer[-1])
        assert sequence.computed_tokens == NEW_TOKENS - 1, "one a token, and nothing of the prompt"
        assert (sequence.shared, sequence.recoveries) == (True, 0)
    assert answer == expected
    assert client.stats().pools["default"].sequences == 0


def test_one_stands_still_loses_its_pages_and_answers_all_the_same(
    worker: Worker, client: radixkv.Client, prompt: list[int], expected: list[int]
) -> None:
    """Another takes all pages meanwhile, its shared ones too, and writes something else into them."""
    worker.tell(prompt, NEW_TOKENS)
    stopped = os.waitid(os.P_PID, worker.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert stopped is not None and stopped.si_code == os.CLD_STOPPED
    pool = client.pool()
    free = client.stats().pools["default"].pages
    with pool.reserve([], headroom_tokens=16 * (POOL["pages"] - free.private), timeout=60.0) as thief:
        pages = torch.from_numpy(thief.page_table.copy()).long()
        for layer in range(POOL["layers"]):
            pool.keys(layer)[pages] = 5.0
            pool.values(layer)[pages] = 5.0
    assert client.stats().counters["revoked_sessions"] == 1
    os.kill(worker.process.pid, signal.SIGCONT)
    assert worker.said() == {"tokens": expected, "recoveries": 1, "shared": True}
