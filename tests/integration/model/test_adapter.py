"""The Transformers adapter over a real daemon, with a tiny random Llama: hits, commits, losses, refusals."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, MistralConfig, MistralForCausalLM

import radixkv
from radixkv.adapters.transformers import PagedCache, PagedModel
from radixkv.adapters.transformers.pages import LocalPages
from radixkv.config import KVSpec

PAGE = 4
TINY_POOL = {"layers": 3, "kv_heads": 2, "head_dim": 8, "page_size": PAGE, "pages": 64}
NAMESPACE = radixkv.Namespace("tiny")
SPEC = KVSpec(layers=3, kv_heads=2, head_dim=8, dtype="float32", page_size=PAGE)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


def plain_greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    ids = torch.tensor([tokens])
    settings = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[
        0, len(tokens) :
    ].tolist()


class Seen:
    """What a model's forward is given: token ids, and the positions they are put at."""

    def __init__(self, model: Any) -> None:
        self.tokens: list[list[int]] = []
        self.positions: list[list[int]] = []
        model.register_forward_pre_hook(self._forward, with_kwargs=True)
        model.model.rotary_emb.register_forward_pre_hook(self._rotary, with_kwargs=True)

    def _forward(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self.tokens.append(kwargs["input_ids"][0].tolist())

    def _rotary(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        self.positions.append(positions[0].tolist())


def held(client: radixkv.Client) -> dict[str, int]:
    """Pages and sequences that somebody still holds."""
    pool = client.stats()["pools"]["default"]
    pages = {state: pool["pages"][state] for state in ("private", "shadow", "quarantined", "loading", "saving")}
    assert sum(pool["pages"].values()) == pool["total_pages"]
    return {**pages, "sequences": pool["sequences"]}


NOTHING = {"private": 0, "shadow": 0, "quarantined": 0, "loading": 0, "saving": 0, "sequences": 0}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 23])
def test_output_equals_plain_generate_and_everything_is_given_back(llama: Any, tiny_client: Any, length: int) -> None:
    tokens = prompt_of(length)
    expected = plain_greedy(llama, tokens, 20)
    paged = PagedModel(llama, tiny_client.pool(), NAMESPACE)
    first = paged.greedy(tokens, 20)
    assert first.tokens == expected
    assert (first.cached_tokens, first.computed_tokens) == (0, length)
    assert first.shared
    assert first.recoveries == 0
    again = paged.greedy(tokens, 20)
    assert again.tokens == expected
    # Of a prompt that is cached in full pages all but one token are, of any other its full pages.
    assert again.cached_tokens == (length - 1 if length % PAGE == 0 else length // PAGE * PAGE)
    assert again.cached_tokens + again.computed_tokens == length
    assert held(tiny_client) == NOTHING


def test_forward_sees_only_uncached_tokens_at_their_positions(llama: Any, tiny_client: Any) -> None:
    document = prompt_of(24)
    paged = PagedModel(llama, tiny_client.pool(), NAMESPACE)
    paged.greedy([*document, 1, 2], 1)
    seen = Seen(llama)
    answer = paged.greedy([*document, 5, 6, 7], 3)
    assert answer.cached_tokens == 24
    assert seen.tokens == [[5, 6, 7], [answer.tokens[0]], [answer.tokens[1]]]
    assert seen.positions == [[24, 25, 26], [27], [28]]


def test_a_long_prompt_is_computed_and_committed_in_chunks(llama: Any, tiny_client: Any) -> None:
    tokens = prompt_of(30)
    paged = PagedModel(llama, tiny_client.pool(), NAMESPACE, chunk_tokens=12)
    seen = Seen(llama)
    cached: list[int] = []

    def on_prefill(done: int, total: int) -> None:
        assert total == 30
        cached.append(tiny_client.pool().lookup(tokens[:done], namespace=NAMESPACE).device_tokens)

    assert paged.greedy(tokens, 8, on_prefill=on_prefill).tokens == plain_greedy(llama, tokens, 8)
    assert [len(step) for step in seen.tokens[:3]] == [12, 12, 6]
    assert cached == [12, 24, 28]


def test_decode_reads_the_shared_pages(llama: Any, tiny_client: Any) -> None:
    """Change one value in a shared page: logits change; put it back: they are as before."""
    tokens = prompt_of(17)
    pool = tiny_client.pool()
    paged = PagedModel(llama, pool, NAMESPACE)
    paged.greedy(tokens, 1)

    def logits() -> torch.Tensor:
        with paged.open(tokens) as sequence:
            assert sequence.cached_tokens == 16
            return sequence.logits().clone()

    clean = logits()
    with paged.open(tokens) as sequence:
        page = sequence.page_table[1]
    for memory in (pool.keys(2), pool.values(0)):
        row = memory[page, 3, 1]
        kept = row.clone()
        row += 1.0
        poisoned = logits()
        row.copy_(kept)
        assert (poisoned - clean).abs().max() > 1e-3
        assert torch.equal(logits(), clean)


def test_generated_pages_are_cached_for_the_next_turn(llama: Any, tiny_client: Any) -> None:
    tokens = prompt_of(10)
    paged = PagedModel(llama, tiny_client.pool(), NAMESPACE)
    first = paged.greedy(tokens, 15)
    turn = [*tokens, *first.tokens, 3, 4]
    second = paged.greedy(turn, 6)
    # The last token of the first answer was never computed: 24 tokens lie in full pages.
    assert second.cached_tokens == 24
    assert second.tokens == plain_greedy(llama, turn, 6)


def test_a_steady_decode_asks_the_daemon_once_a_page(llama: Any, tiny_client: Any) -> None:
    paged = PagedModel(llama, tiny_client.pool(), NAMESPACE)
    with paged.open(prompt_of(PAGE), 40) as sequence:
        sequence.logits()
        before = tiny_client.stats()["counters"]["requests"]
        for _ in range(8 * PAGE):
            sequence.append(1)
            sequence.logits()
        stats = tiny_client.stats()
        asked = stats["counters"]["requests"] - before
        assert asked <= 8 + 2  # eight pages; the two stats requests count as well
        # Pages become visible one page after they are complete.
        assert stats["pools"]["default"]["pages"]["cached"] >= 8
    assert tiny_client.stats()["pools"]["default"]["pages"]["cached"] == 9


def test_two_workers_share_one_document(llama: Any, tiny_daemon: Any) -> None:
    document = prompt_of(40)
    with radixkv.connect(tiny_daemon.endpoint) as one, radixkv.connect(tiny_daemon.endpoint) as two:
        first = PagedModel(llama, one.pool(), NAMESPACE)
        second = PagedModel(llama, two.pool(), NAMESPACE)
        with first.open([*document, 1], 4) as a, second.open([*document, 2], 4) as b:
            # Both computed the document: neither was committed when the other began.
            a.logits()
            b.logits()
            assert a.cached_tokens == b.cached_tokens == 0
            with second.open([*document, 3], 4) as c:
                assert c.cached_tokens == 40
                assert c.page_table[:10] == a.page_table[:10]
        assert held(one) == NOTHING
        answer = second.greedy([*document, 3], 6)
        assert answer.tokens == plain_greedy(llama, [*document, 3], 6)


def test_another_namespace_shares_nothing(llama: Any, tiny_client: Any) -> None:
    tokens = prompt_of(20)
    pool = tiny_client.pool()
    PagedModel(llama, pool, NAMESPACE).greedy(tokens, 2)
    assert PagedModel(llama, pool, radixkv.Namespace("tiny", salt="b")).greedy(tokens, 2).cached_tokens == 0


def test_stop_ends_with_the_stop_token(llama: Any, tiny_client: Any) -> None:
    tokens = prompt_of(9)
    expected = plain_greedy(llama, tokens, 12)
    stop = expected[5]
    said: list[int] = []
    answer = PagedModel(llama, tiny_client.pool(), NAMESPACE).greedy(tokens, 12, stop={stop}, on_token=said.append)
    assert answer.tokens == said == expected[: expected.index(stop) + 1]


# -- handed off ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "appended"), [(1, 1), (7, 0), (8, 1), (23, 6)])
def test_what_one_computed_another_goes_on_with(llama: Any, tiny_daemon: Any, length: int, appended: int) -> None:
    """No key or value is computed twice, whatever part of a page the sequence ends in when it is handed off."""
    tokens = prompt_of(length)
    expected = plain_greedy(llama, tokens, 20)
    with radixkv.connect(tiny_daemon.endpoint) as one, radixkv.connect(tiny_daemon.endpoint) as two:
        with PagedModel(llama, one.pool(), NAMESPACE).open(tokens, 20) as given:
            for token in expected[:appended]:
                given.logits()
                given.append(token)
            table = given.page_table
            ticket = given.handoff()
        seen = Seen(llama)
        decode = PagedModel(llama, two.pool(), NAMESPACE)
        with decode.adopt(ticket, 20) as adopted:
            assert adopted.tokens == [*tokens, *expected[:appended]]
            assert adopted.page_table[: len(table)] == table
            for token in expected[appended:]:
                assert int(adopted.logits().argmax()) == token
                adopted.append(token)
            assert adopted.recoveries == 0
        computed = [position for step in seen.positions for position in step]
        first = length + appended - 1 if appended else 0
        assert computed == list(range(first, length + 19))
        assert held(two) == NOTHING
        with pytest.raises(radixkv.StaleHandle):
            decode.adopt(ticket)


def test_pages_that_were_adopted_can_be_lost_like_others(llama: Any, daemon_factory: Any) -> None:
    tokens = prompt_of(22)
    expected = plain_greedy(llama, tokens, 10)
    old = daemon_factory(pools=[TINY_POOL])
    with radixkv.connect(old.endpoint) as client:
        paged = PagedModel(llama, client.pool(), NAMESPACE)
        given = paged.open(tokens, 10)
        given.logits()
        given.append(expected[0])
        with paged.adopt(given.handoff(), 10) as adopted:
            assert int(adopted.logits().argmax()) == expected[1]
            old.kill()
            daemon_factory(pools=[TINY_POOL], endpoint=old.endpoint)
            for token, after in itertools.pairwise(expected[1:]):
                adopted.append(token)
                assert int(adopted.logits().argmax()) == after
            assert (adopted.recoveries, adopted.shared) == (1, True)
        assert held(client) == NOTHING


def test_local_pages_stay_where_they_are(llama: Any) -> None:
    paged = PagedModel(llama)
    with paged.open([1, 2], 1) as sequence, pytest.raises(ValueError, match="local pages"):
        sequence.handoff()
    with pytest.raises(ValueError, match="no pool"):
        paged.adopt(bytes(16))


# -- losses -------------------------------------------------------------------------------------------------------


def interrupted(paged: PagedModel, tokens: list[int], count: int, at: int, event: Any) -> Any:
    """Greedy decoding in which ``event`` happens just before token number ``at`` is computed."""

    def on_token(_token: int) -> None:
        nonlocal said
        said += 1
        if said == at:
            event()

    said = 0
    return paged.greedy(tokens, count, on_token=on_token)


def test_a_daemon_that_dies_changes_nothing_in_the_output(llama: Any, tiny_daemon: Any) -> None:
    tokens = prompt_of(22)
    with radixkv.connect(tiny_daemon.endpoint, timeout=0.5) as client:
        paged = PagedModel(llama, client.pool(), NAMESPACE)
        answer = interrupted(paged, tokens, 20, 5, tiny_daemon.kill)
        assert answer.tokens == plain_greedy(llama, tokens, 20)
        assert answer.recoveries == 1
        assert not answer.shared
        later = paged.greedy(tokens, 5)
        assert later.tokens == answer.tokens[:5]
        assert not later.shared


def test_without_recompute_a_dead_daemon_is_an_error(llama: Any, tiny_daemon: Any) -> None:
    with radixkv.connect(tiny_daemon.endpoint, timeout=0.5) as client:
        paged = PagedModel(llama, client.pool(), NAMESPACE, on_lost="raise")
        with pytest.raises((radixkv.Unavailable, radixkv.Timeout, radixkv.SessionLost)):
            interrupted(paged, prompt_of(22), 20, 5, tiny_daemon.kill)
        with pytest.raises((radixkv.Unavailable, radixkv.Timeout)):
            paged.greedy(prompt_of(22), 20)


def test_a_new_daemon_is_used_again_and_the_output_is_the_same(
    llama: Any, daemon_factory: Any, wait_until: Any
) -> None:
    """The pages are lost with the old daemon; everything so far is reserved and computed again in the new one."""
    tokens = prompt_of(22)
    old = daemon_factory(pools=[TINY_POOL])
    with radixkv.connect(old.endpoint, timeout=5.0) as client:
        paged = PagedModel(llama, client.pool(), NAMESPACE)

        def restart() -> None:
            old.kill()
            daemon_factory(pools=[TINY_POOL], endpoint=old.endpoint)

        answer = interrupted(paged, tokens, 20, 5, restart)
        assert answer.tokens == plain_greedy(llama, tokens, 20)
        assert answer.recoveries == 1
        assert answer.shared
        assert paged.greedy(tokens, 3).cached_tokens == 20
        assert held(client) == NOTHING


def test_a_daemon_that_hangs_costs_a_deadline_or_two_and_gets_its_pages_back(
    llama: Any, tiny_daemon: Any, wait_until: Any
) -> None:
    tokens = prompt_of(22)
    with radixkv.connect(tiny_daemon.endpoint, timeout=1.0) as client:
        paged = PagedModel(llama, client.pool(), NAMESPACE)
        began = time.monotonic()
        answer = interrupted(paged, tokens, 20, 5, tiny_daemon.pause)
        # One deadline for the verb that noticed, one for the reserve after it; the rest is computing.
        assert time.monotonic() - began < 15.0
        assert answer.tokens == plain_greedy(llama, tokens, 20)
        assert not answer.shared
        tiny_daemon.resume()
        wait_until(lambda: held(client) == NOTHING, what="the pages of the sequence given up")


STOPPED_WORKER = """
import json, os, signal, sys
from transformers import LlamaForCausalLM
import radixkv
from radixkv.adapters.transformers import PagedModel

endpoint, folder, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
said = []

def on_token(token):
    said.append(token)
    if len(said) == 3:
        os.kill(os.getpid(), signal.SIGSTOP)

with radixkv.connect(endpoint) as client:
    paged = PagedModel(LlamaForCausalLM.from_pretrained(folder), client.pool(), radixkv.Namespace("tiny"))
    paged.greedy(tokens, 1)
    answer = paged.greedy(tokens, 8, on_token=on_token)
    print(json.dumps([answer.tokens, answer.cached_tokens, answer.recoveries, answer.shared]))
"""


def test_pages_taken_while_it_was_stopped_are_noticed_before_a_token_leaves(
    llama: Any, daemon_factory: Any, tmp_path: Any
) -> None:
    """A worker is stopped past its lease and its shared pages are given to another, who writes something else there."""
    daemon = daemon_factory(pools=[{**TINY_POOL, "pages": 12}], lease_s=0.3, heartbeat_s=0.1)
    tokens = prompt_of(14)
    expected = plain_greedy(llama, tokens, 8)
    llama.save_pretrained(tmp_path)
    command = [sys.executable, "-c", STOPPED_WORKER, daemon.endpoint, str(tmp_path), json.dumps(tokens)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker,
        radixkv.connect(daemon.endpoint) as client,
    ):
        try:
            stopped = os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            assert stopped is not None
            assert stopped.si_code == os.CLD_STOPPED
            pool = client.pool()
            thief = pool.reserve(prompt_of(36, seed=9), timeout=20.0)
            for layer in range(3):
                for memory in (pool.keys(layer), pool.values(layer)):
                    memory[torch.from_numpy(thief.page_table.copy()).long()] = 5.0
            thief.free()
            os.kill(worker.pid, signal.SIGCONT)
            output, _ = worker.communicate(timeout=120)
        finally:
            worker.kill()
    assert worker.returncode == 0
    assert json.loads(output) == [expected, 12, 1, True]


def test_without_a_pool_it_computes_in_local_pages(llama: Any) -> None:
    tokens = prompt_of(22)
    answer = PagedModel(llama).greedy(tokens, 20)
    assert answer.tokens == plain_greedy(llama, tokens, 20)
    assert not answer.shared
    assert answer.cached_tokens == 0


def test_a_pool_that_is_too_small_is_an_error_and_leaks_nothing(llama: Any, daemon_factory: Any) -> None:
    daemon = daemon_factory(pools=[{**TINY_POOL, "pages": 6}])
    with radixkv.connect(daemon.endpoint) as client:
        paged = PagedModel(llama, client.pool(), NAMESPACE)
        with pytest.raises(radixkv.OutOfPages) as refused:
            paged.greedy(prompt_of(40), 2)
        assert refused.value.need == 11
        said: list[int] = []
        with pytest.raises(radixkv.OutOfPages):
            paged.greedy(prompt_of(15), 20, on_token=said.append)
        # All 24 positions of the pool were used before it gave up.
        assert len(said) == 24 - 15 + 1
        assert held(client) == NOTHING


# -- what is refused ----------------------------------------------------------------------------------------------


def test_shared_positions_are_never_written() -> None:
    pages = LocalPages(SPEC, 16)
    pages.writable_from_tokens = 8  # type: ignore[misc]
    cache = PagedCache(pages, seen=7)
    states = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ValueError, match=r"positions 7\.\.7 are not writable; allowed: 8\.\.15"):
        cache.update(states, states, 0)
    assert cache.get_seq_length() == 7


def test_a_batch_is_refused() -> None:
    cache = PagedCache(LocalPages(SPEC, 16), seen=0)
    states = torch.zeros(2, 2, 1, 8)
    with pytest.raises(ValueError, match="batch of 2"):
        cache.update(states, states, 0)


def test_padding_is_refused(llama: Any) -> None:
    PagedModel(llama)
    cache = PagedCache(LocalPages(SPEC, 16), seen=0)
    with torch.inference_mode():
        llama(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        with pytest.raises(ValueError, match="padded"):
            llama(torch.tensor([[4]]), past_key_values=cache, attention_mask=torch.tensor([[0, 1, 1, 1]]))


def test_transformers_own_generate_works_on_a_paged_cache(llama: Any) -> None:
    """The cache and the attention function are enough; PagedModel's loop is a convenience."""
    tokens = prompt_of(11)
    expected = plain_greedy(llama, tokens, 9)
    PagedModel(llama)
    ids = torch.tensor([tokens])
    output = llama.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=PagedCache(LocalPages(SPEC, 20), seen=0),
        generation_config=GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0),
    )
    assert output[0, 11:].tolist() == expected


def test_sliding_windows_are_refused_by_name() -> None:
    config = MistralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=16,
    )  # fmt: skip
    with pytest.raises(ValueError, match="sliding_window 16"):
        PagedModel(MistralForCausalLM(config))


def test_a_pool_of_another_shape_is_refused(llama: Any, daemon_factory: Any) -> None:
    daemon = daemon_factory(pools=[{**TINY_POOL, "head_dim": 16}])
    with radixkv.connect(daemon.endpoint) as client:
        with pytest.raises(ValueError, match="head_dim = 16, the model needs 8"):
            PagedModel(llama, client.pool(), NAMESPACE)
        with pytest.raises(ValueError, match="namespace"):
            PagedModel(llama, client.pool())


def test_wrong_arguments_are_named(llama: Any) -> None:
    with pytest.raises(ValueError, match="recompute, raise"):
        PagedModel(llama, on_lost="ignore")
    with pytest.raises(ValueError, match="max_new_tokens = 0"):
        PagedModel(llama).greedy([1], 0)
    with pytest.raises(ValueError, match="empty prompt"):
        PagedModel(llama).greedy([], 1)
    with PagedModel(llama).open([1, 2], 1) as sequence:
        sequence.logits()
        with pytest.raises(ValueError, match="given already"):
            sequence.logits()
        sequence.append(3)
        with pytest.raises(ValueError, match="opened for 3 tokens"):
            sequence.append(4)


# -- restarts under a keeper --------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_lost", ["recompute", "raise"])
def test_a_daemon_that_comes_back_is_not_noticed(llama: Any, daemon_factory: Any, on_lost: str) -> None:
    """Killed twice in one answer: no page is computed again, no recovery, the same page table and output."""
    tokens = prompt_of(22)
    daemon = daemon_factory(pools=[TINY_POOL], supervised=True)
    expected = plain_greedy(llama, tokens, 24)
    with radixkv.connect(daemon.endpoint, timeout=20.0) as client:
        paged = PagedModel(llama, client.pool(), NAMESPACE, on_lost=on_lost)
        with paged.open(tokens, 24) as sequence:
            table = sequence.page_table
            for place, token in enumerate(expected):
                if place == 6:
                    daemon.wait_ready()
                if place in (5, 6, 15):
                    daemon.kill_daemon()
                assert int(sequence.logits().argmax()) == token
                sequence.append(token)
                if place in (6, 15):
                    daemon.wait_ready()
            assert (sequence.recoveries, sequence.shared, sequence.computed_tokens) == (0, True, 22 + 23)
            assert sequence.page_table[: len(table)] == table
        assert paged.greedy([*tokens, *expected], 2).cached_tokens == 44
        assert held(client) == NOTHING
