"""``generate`` over a real daemon, with a tiny random Llama: what ``model.generate`` gives, whatever happens."""

from __future__ import annotations

import copy
import itertools
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import radixkv
from radixkv.adapters.transformers import PagedCache, PagedModel, generate, namespace_of
from radixkv.adapters.transformers.batch_cache import BatchCache, by_memory
from radixkv.adapters.transformers.decoding import prompts_of
from radixkv.adapters.transformers.pages import LocalPages
from radixkv.config import KVSpec

PAGE = 4
PAD = 96
TINY_POOL = {"layers": 3, "kv_heads": 2, "head_dim": 8, "page_size": PAGE, "pages": 96}
NAMESPACE = radixkv.Namespace("tiny")
NOTHING = {"private": 0, "shadow": 0, "quarantined": 0, "loading": 0, "saving": 0, "sequences": 0}


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 90, length).tolist()


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """As a tokenizer with padding_side="left" would give them."""
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def with_common(prefix: int, *rests: int) -> dict[str, torch.Tensor]:
    return padded([tokens_of(prefix) + tokens_of(rest, seed) for seed, rest in enumerate(rests, start=1)])


def held(client: radixkv.Client, name: str = "default") -> dict[str, int]:
    """Pages and sequences that somebody still holds."""
    pool = client.stats()["pools"][name]
    assert sum(pool["pages"].values()) == pool["total_pages"]
    pages = {state: pool["pages"][state] for state in NOTHING if state != "sequences"}
    return {**pages, "sequences": pool["sequences"]}


@pytest.fixture(scope="module")
def client(daemon_factory: Any) -> Any:
    sized = [{**TINY_POOL, "name": f"page{size}", "page_size": size, "pages": 400 // size} for size in (1, 4, 16)]
    with radixkv.connect(daemon_factory(pools=[TINY_POOL, *sized]).endpoint) as client:
        yield client


@pytest.fixture(scope="module")
def models(random_llama: Any) -> tuple[Any, Any]:
    """(for pages, for Transformers alone)"""
    return copy.deepcopy(random_llama), copy.deepcopy(random_llama)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a byte."""
    alphabet = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture()
def plain(random_llama: Any) -> Any:
    """The same model, whose attention nobody has touched."""
    return copy.deepcopy(random_llama)


@pytest.fixture()
def fresh(request: pytest.FixtureRequest) -> radixkv.Namespace:
    """In which nothing is cached yet."""
    return radixkv.Namespace("tiny", salt=request.node.name)


def test_one_argument_more_gives_the_same(llama: Any, plain: Any, client: radixkv.Client) -> None:
    inputs = with_common(11, 3, 7, 1)
    expected = plain.generate(**inputs, max_new_tokens=12, pad_token_id=PAD)
    assert torch.equal(generate(llama, **inputs, max_new_tokens=12, pad_token_id=PAD, pool=client.pool()), expected)
    ids = inputs["input_ids"][2:]
    unpadded = plain.generate(ids, max_new_tokens=3, pad_token_id=None)
    assert torch.equal(generate(llama, ids, max_new_tokens=3, pad_token_id=None, pool=None), unpadded)
    assert held(client) == NOTHING


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Prompts that begin alike or not, and how they are to be continued."""
    stems = [draw(st.lists(st.integers(0, 90), max_size=20)) for _ in range(2)]
    prompts = draw(
        st.lists(
            st.builds(
                lambda stem, cut, rest: stem[:cut] + rest,
                st.sampled_from(stems),
                st.integers(0, 20),
                st.lists(st.integers(0, 90), min_size=1, max_size=9),
            ),
            min_size=1,
            max_size=5,
        )
    )
    sampling = {"do_sample": True, "temperature": draw(st.sampled_from([0.3, 1.0])), "top_k": 20, "top_p": 0.9}
    return {
        **padded(prompts),
        "pad_token_id": PAD,
        "max_new_tokens": draw(st.integers(1, 12)),
        # A third of the vocabulary ends a text, so that rows end at different steps.
        "eos_token_id": draw(st.sampled_from([None, list(range(0, 97, 3)), list(range(97))])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "num_return_sequences": draw(st.sampled_from([1, 1, 2])),
        **draw(st.sampled_from([{}, sampling])),
    }  # fmt: skip


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(asked=batches(), pool=st.sampled_from(["page1", "page4", "page16", None]), seed=st.integers(0, 99))
def test_any_batch_gives_what_model_generate_gives(
    models: tuple[Any, Any], client: radixkv.Client, asked: dict[str, Any], pool: str | None, seed: int
) -> None:
    """Token by token, padding and all; sampled with the same seed, also sampled the same."""
    ours, theirs = models
    if "do_sample" not in asked:
        asked["num_return_sequences"] = 1  # greedy search has one answer, Transformers insists
    torch.manual_seed(seed)
    expected = theirs.generate(**asked)
    torch.manual_seed(seed)
    answer = generate(ours, **asked, pool=client.pool(pool) if pool else None)
    assert torch.equal(answer, expected), (answer, expected)
    for name in ("page1", "page4", "page16"):
        assert held(client, name) == NOTHING


def test_the_common_prefix_is_computed_once_and_each_step_is_one_forward(
    llama: Any, client: radixkv.Client, fresh: radixkv.Namespace
) -> None:
    forwards: list[list[list[int]]] = []
    llama.register_forward_pre_hook(
        lambda _module, _args, given: forwards.append(given["input_ids"].tolist()), with_kwargs=True
    )
    inputs = with_common(3 * PAGE, 3, 7, 1)
    answer = generate(
        llama, **inputs, max_new_tokens=4, pad_token_id=PAD, pool=client.pool(), namespace=fresh
    )[:, inputs["input_ids"].shape[1] :]  # fmt: skip
    assert [[len(row) for row in forward] for forward in forwards] == [[15], [7], [1], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert forwards[3:] == [[[token] for token in step] for step in answer.T[:-1].tolist()]


def test_a_row_that_is_over_gives_its_pages_back_while_the_others_go_on(
    llama: Any, client: radixkv.Client, fresh: radixkv.Namespace
) -> None:
    inputs = with_common(6, 3, 5, 1)
    free = generate(llama, **inputs, max_new_tokens=10, pad_token_id=PAD, pool=None)[:, -10:].tolist()
    stop = free[1][2]
    assert stop not in free[0] + free[2]
    said: list[tuple[int, int]] = []
    sequences: list[int] = []

    def on_token(row: int, token: int) -> None:
        said.append((row, token))
        if row == 0:
            sequences.append(held(client)["sequences"])

    asked = {"max_new_tokens": 10, "pad_token_id": PAD, "eos_token_id": stop}
    answer = generate(llama, **inputs, **asked, pool=client.pool(), namespace=fresh, on_token=on_token)[:, -10:]
    assert answer[1].tolist() == free[1][: free[1].index(stop) + 1] + [PAD] * (9 - free[1].index(stop))
    for row in range(3):
        assert [token for place, token in said if place == row] == [
            each for each in answer[row].tolist() if each != PAD
        ]
    assert sequences == [3] * (free[1].index(stop) + 1) + [2] * (9 - free[1].index(stop))


class Recorder:
    """A streamer that remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.given.append(value.tolist())

    def end(self) -> None:
        self.given.append("end")


def test_a_streamer_is_told_what_model_generate_tells_it(llama: Any, plain: Any, client: radixkv.Client) -> None:
    inputs = padded([tokens_of(9)])
    theirs, ours = Recorder(), Recorder()
    plain.generate(**inputs, max_new_tokens=5, pad_token_id=PAD, streamer=theirs)
    generate(llama, **inputs, max_new_tokens=5, pad_token_id=PAD, streamer=ours, pool=client.pool())
    assert ours.given == theirs.given
    assert len(ours.given) == 1 + 5 + 1


def test_text_streams(llama: Any, client: radixkv.Client, tokenizer: Any) -> None:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10.0)
    inputs = padded([tokens_of(9)])
    answer = generate(llama, **inputs, max_new_tokens=8, pad_token_id=PAD, streamer=streamer, pool=client.pool())
    assert "".join(streamer) == tokenizer.decode(answer[0, 9:])


@pytest.mark.parametrize("way", ["argument", "generation_config"])
def test_stop_strings_end_a_row(llama: Any, plain: Any, client: radixkv.Client, tokenizer: Any, way: str) -> None:
    """Without an end-of-text token rows go on until all are over, as in Transformers; with one they are padded."""
    inputs = with_common(9, 2, 4)
    free = plain.generate(**inputs, max_new_tokens=12, pad_token_id=PAD)[:, -12:]
    stop = tokenizer.decode(free[0, 3:5])
    for end in (None, int(free[1, 8])):
        asked: dict[str, Any] = {"tokenizer": tokenizer}
        config = GenerationConfig(max_new_tokens=12, pad_token_id=PAD, eos_token_id=end)
        if way == "argument":
            asked["stop_strings"] = [stop]
        else:
            config.stop_strings = [stop]
        expected = plain.generate(**inputs, **asked, generation_config=config)
        assert torch.equal(generate(llama, **inputs, **asked, generation_config=config, pool=client.pool()), expected)
        assert config.stop_strings == (None if way == "argument" else [stop])
    with pytest.raises(ValueError, match="tokenizer"):
        generate(llama, **inputs, stop_strings=["x"], pool=client.pool())


def test_criteria_and_processors_of_ones_own(llama: Any, plain: Any, client: radixkv.Client) -> None:
    inputs = with_common(9, 2, 4)

    def never(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ids[0, -1]] = -torch.inf
        return scores

    def seven(ids: torch.Tensor, _scores: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 13 + 7)

    asked = {
        "max_new_tokens": 12, "pad_token_id": PAD,
        "logits_processor": LogitsProcessorList([never]), "stopping_criteria": StoppingCriteriaList([seven]),
    }  # fmt: skip
    expected = plain.generate(**inputs, **asked)
    assert expected.shape == (2, 13 + 7)
    assert torch.equal(generate(llama, **inputs, **asked, pool=client.pool()), expected)


def test_scores_and_logits_are_recorded(llama: Any, plain: Any, client: radixkv.Client) -> None:
    inputs = with_common(9, 2, 4)
    asked = {
        "max_new_tokens": 5, "pad_token_id": PAD, "repetition_penalty": 1.2,
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    }  # fmt: skip
    theirs = plain.generate(**inputs, **asked)
    ours = generate(llama, **inputs, **asked, pool=client.pool())
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        assert len(ours[name]) == 5
        torch.testing.assert_close(torch.stack(ours[name]), torch.stack(theirs[name]), atol=1e-4, rtol=1e-4)


def test_the_loop_can_be_given_to_model_generate(llama: Any, plain: Any, client: radixkv.Client) -> None:
    inputs = with_common(9, 2, 4)
    asked = {"max_new_tokens": 6, "pad_token_id": PAD}
    paged = PagedModel(llama, client.pool(), NAMESPACE)
    said: list[tuple[int, int]] = []
    answer = llama.generate(**inputs, **asked, custom_generate=paged.decode, on_token=lambda *each: said.append(each))
    assert torch.equal(answer, plain.generate(**inputs, **asked))
    assert said == [(row, int(answer[row, 13 + step])) for step in range(6) for row in range(2)]
    with pytest.raises(ValueError, match="another one"):
        plain.generate(**inputs, **asked, custom_generate=paged.decode)


def test_the_short_pieces_on_the_page_run_as_they_stand(llama: Any, plain: Any, client: radixkv.Client) -> None:
    """docs/own-loop.md; what they do not import has the names of its program."""
    page = (Path(__file__).parents[3] / "docs" / "own-loop.md").read_text()
    first, last = re.findall(r"```python\n(from radixkv.*?)```", page, flags=re.DOTALL)
    inputs = {**with_common(9, 2, 4), "pad_token_id": PAD}
    names = {"model": llama, "client": client, "inputs": inputs, "asked": {**inputs, "max_new_tokens": 6}}
    exec(first, names)
    assert torch.equal(names["ours"], names["theirs"])
    exec(last, names)
    assert torch.equal(names["answers"], plain.generate(**names["asked"]))


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"num_beams": 2}, "num_beams = 2 is not supported with radixkv pages; allowed: None, 1"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha = 0.6"),
        ({"dola_layers": "low"}, "dola_layers"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens = 3"),
        ({"cache_implementation": "static"}, "cache_implementation = 'static'"),
        ({"cache_implementation": "paged"}, "cache_implementation = 'paged'"),
        ({"use_cache": False}, "use_cache = False"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"generation_config": GenerationConfig(num_beams=3, max_new_tokens=2)}, "num_beams = 3"),
        ({"assistant_model": "the model"}, "assistant_model"),
        ({"past_key_values": DynamicCache()}, "past_key_values"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds"),
        ({"position_ids": torch.tensor([[5, 6, 7]])}, "position_ids"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "padding on the left"),
        ({"attention_mask": torch.tensor([[0, 1]])}, r"attention_mask is \[1, 2\]; allowed: \[1, 3\]"),
        ({"inputs": torch.ones(1, 3)}, "input_ids are .* of torch.float32"),
        ({"inputs": torch.ones(0, 3).long()}, "an empty prompt"),
        ({"max_new_token": 4}, "max_new_token"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_does_not_do_is_refused_by_name(
    llama: Any, client: radixkv.Client, asked: dict[str, Any], said: str
) -> None:
    computed: list[int] = []
    llama.register_forward_pre_hook(lambda *_: computed.append(1))
    with pytest.raises(ValueError, match=said):
        asked = {"inputs": torch.tensor([[1, 2, 3]]), "max_new_tokens": 2, "pad_token_id": PAD, **asked}
        generate(llama, pool=client.pool(), **asked)
    assert computed == []
    assert held(client) == NOTHING


def test_the_loop_alone_refuses_too(llama: Any) -> None:
    """What comes by ``custom_generate`` has not passed ``generate``."""
    decode = PagedModel(llama).decode
    ids = torch.tensor([[1, 2, 3]])
    for asked in ({"num_beams": 2}, {"position_ids": ids}, {"output_hidden_states": True}):
        with pytest.raises(ValueError, match=next(iter(asked))):
            llama.generate(ids, custom_generate=decode, pad_token_id=PAD, max_new_tokens=2, **asked)
    used = DynamicCache()
    llama(ids, past_key_values=used)
    with pytest.raises(ValueError, match="past_key_values"):
        llama.generate(torch.tensor([[1, 2, 3, 4]]), past_key_values=used, custom_generate=decode, max_new_tokens=2)


# -- losses -------------------------------------------------------------------------------------------------------


ASKED = {"max_new_tokens": 14, "pad_token_id": PAD, "eos_token_id": None}
INPUTS = with_common(10, 3, 7, 1)


def at(step: int, event: Callable[[], object]) -> Callable[[int, int], None]:
    """An on_token that lets something happen once, when row 0 has been told its token number ``step``."""
    steps = itertools.count(1)

    def on_token(row: int, _token: int) -> None:
        if row == 0 and next(steps) == step:
            event()

    return on_token


def test_without_a_daemon_it_computes_in_local_pages(llama: Any, plain: Any) -> None:
    expected = plain.generate(**INPUTS, **ASKED)
    assert torch.equal(generate(llama, **INPUTS, **ASKED, pool=None), expected)


@pytest.mark.parametrize("step", [1, 5])
def test_a_daemon_that_dies_changes_nothing_in_the_output(llama: Any, plain: Any, tiny_daemon: Any, step: int) -> None:
    expected = plain.generate(**INPUTS, **ASKED)
    with radixkv.connect(tiny_daemon.endpoint, timeout=0.5) as client:
        pool = client.pool()
        assert torch.equal(generate(llama, **INPUTS, **ASKED, pool=pool, on_token=at(step, tiny_daemon.kill)), expected)
        assert torch.equal(generate(llama, **INPUTS, **ASKED, pool=pool), expected)  # it is not there from the start
        with pytest.raises((radixkv.Unavailable, radixkv.Timeout)):
            generate(llama, **INPUTS, **ASKED, pool=pool, on_lost="raise")


def test_a_daemon_that_hangs_is_waited_for_by_one_row_not_by_each(
    llama: Any, plain: Any, tiny_daemon: Any, wait_until: Any
) -> None:
    expected = plain.generate(**INPUTS, **ASKED)[:, INPUTS["input_ids"].shape[1] :]
    prompts = prompts_of(**INPUTS)
    with radixkv.connect(tiny_daemon.endpoint, timeout=1.0) as client:
        with PagedModel(llama, client.pool(), NAMESPACE).batch(prompts, 14) as batch:
            assert batch.prefill().argmax(-1).tolist() == expected[:, 0].tolist()
            for step, (tokens, after) in enumerate(itertools.pairwise(expected.T.tolist())):
                if step == 5:
                    tiny_daemon.pause()
                assert batch.step(tokens).argmax(-1).tolist() == after
            assert [(row.shared, row.recoveries) for row in batch.rows] == [(False, 1)] * 3
            assert sorted(type(row.refusal) for row in batch.rows if row.refusal is not None) == [radixkv.Timeout]
            tiny_daemon.resume()
        wait_until(lambda: held(client) == NOTHING, what="the pages of the rows given up")


def test_a_new_daemon_is_used_again(llama: Any, plain: Any, daemon_factory: Any) -> None:
    old = daemon_factory(pools=[TINY_POOL])
    with radixkv.connect(old.endpoint, timeout=5.0) as client:

        def restart() -> None:
            old.kill()
            daemon_factory(pools=[TINY_POOL], endpoint=old.endpoint)

        pool = client.pool()
        answer = generate(llama, **INPUTS, **ASKED, pool=pool, namespace=NAMESPACE, on_token=at(5, restart))
        assert torch.equal(answer, plain.generate(**INPUTS, **ASKED))
        # All three rows are in the new daemon's pages by their end: what they share, and what each has of its own.
        for row, mask in zip(answer, INPUTS["attention_mask"], strict=True):
            tokens = row[(mask == 0).sum() :].tolist()
            known = pool.lookup(tokens, namespace=NAMESPACE).device_tokens
            assert known == (len(tokens) - 1) // PAGE * PAGE
        assert held(client) == NOTHING


def test_a_daemon_that_comes_back_is_not_noticed(llama: Any, plain: Any, daemon_factory: Any) -> None:
    daemon = daemon_factory(pools=[TINY_POOL], supervised=True)
    with radixkv.connect(daemon.endpoint, timeout=20.0) as client:
        answer = generate(
            llama, **INPUTS, **ASKED, pool=client.pool(), on_lost="raise", on_token=at(5, daemon.kill_daemon)
        )
        assert torch.equal(answer, plain.generate(**INPUTS, **ASKED))
        assert held(client) == NOTHING


def test_rows_for_which_there_is_no_room_go_on_in_local_pages(llama: Any, plain: Any, daemon_factory: Any) -> None:
    """Room for the prompts of two rows at first, and then not even for what these become."""
    daemon = daemon_factory(pools=[{**TINY_POOL, "pages": 9}])
    with radixkv.connect(daemon.endpoint) as client:
        pool = client.pool()
        assert torch.equal(generate(llama, **INPUTS, **ASKED, pool=pool), plain.generate(**INPUTS, **ASKED))
        assert held(client) == NOTHING
        with pytest.raises(radixkv.OutOfPages):
            generate(llama, **INPUTS, **ASKED, pool=pool, on_lost="raise")
        assert held(client) == NOTHING


def test_a_consumer_that_raises_gets_its_error_and_leaves_nothing(llama: Any, client: radixkv.Client) -> None:
    def fail() -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        generate(llama, **INPUTS, **ASKED, pool=client.pool(), on_token=at(3, fail))
    assert held(client) == NOTHING


KILLED_WORKER = """
import os, signal, sys
import torch
from transformers import LlamaForCausalLM
import radixkv
from radixkv.adapters.transformers import generate

endpoint, folder = sys.argv[1:]
said = []

def on_token(row, token):
    said.append(token)
    if len(said) == 24:
        os.kill(os.getpid(), signal.SIGKILL)

with radixkv.connect(endpoint) as client:
    model = LlamaForCausalLM.from_pretrained(folder)
    inputs = torch.load(folder + "/inputs.pt")
    generate(model, **inputs, max_new_tokens=14, pad_token_id=96, pool=client.pool(), on_token=on_token)
"""


def test_a_killed_worker_leaves_what_is_complete_and_holds_nothing(
    llama: Any, plain: Any, tiny_daemon: Any, tmp_path: Any, wait_until: Any
) -> None:
    """And the next worker, which names the weights by their digest as the first did, goes on from there."""
    llama.save_pretrained(tmp_path)
    torch.save(INPUTS, tmp_path / "inputs.pt")
    command = [sys.executable, "-c", KILLED_WORKER, tiny_daemon.endpoint, str(tmp_path)]
    worker = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert worker.returncode == -signal.SIGKILL, worker.stderr
    computed: list[int] = []
    llama.register_forward_pre_hook(
        lambda _module, _args, given: computed.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    with radixkv.connect(tiny_daemon.endpoint) as client:
        wait_until(lambda: held(client) == NOTHING, what="the end of the killed worker's session")
        answer = generate(llama, **INPUTS, **ASKED, pool=client.pool())
        assert torch.equal(answer, plain.generate(**INPUTS, **ASKED))
        assert computed[:3] == [13 % PAGE, 17 % PAGE, 11 % PAGE]


# -- the name of the weights --------------------------------------------------------------------------------------


def test_equal_weights_have_one_name_and_others_another(llama: Any, plain: Any, tmp_path: Any) -> None:
    name = namespace_of(llama)
    plain.save_pretrained(tmp_path)
    assert namespace_of(plain) == namespace_of(type(plain).from_pretrained(tmp_path)) == name
    assert namespace_of(plain, salt="a") == radixkv.Namespace(name.model, salt="a")
    with torch.no_grad():
        plain.model.layers[1].mlp.up_proj.weight[3, 4] += 0.01
    changed = namespace_of(plain)
    assert changed != name
    plain.model.norm.weight = torch.nn.Parameter(plain.model.norm.weight * 2)
    assert namespace_of(plain) not in (name, changed)
    llama.config.rms_norm_eps = 1e-3
    assert namespace_of(copy.deepcopy(llama)) != name


def test_other_weights_in_the_same_place_have_another_name(llama: Any) -> None:
    """What lies where a tensor lay is not that tensor: its memory is used again as soon as it is gone."""
    norm, memory = llama.model.norm, np.ones(32, np.float32)
    norm.weight = torch.nn.Parameter(torch.from_numpy(memory))
    name = namespace_of(llama)
    norm.weight = torch.nn.Parameter(torch.zeros(32))
    memory[:] = 2
    norm.weight = torch.nn.Parameter(torch.from_numpy(memory))
    assert namespace_of(llama) != name


def test_weights_that_can_be_switched_have_no_name_of_their_own(llama: Any) -> None:
    llama.peft_config = {"first": "as the PEFT library leaves it on a model with adapters"}
    with pytest.raises(ValueError, match=r"adapters loaded .* lora="):
        namespace_of(llama)
    del llama.peft_config
    namespace_of(llama)


def test_a_batch_computes_one_token_a_row() -> None:
    pages = LocalPages(KVSpec(layers=1, kv_heads=2, head_dim=8, dtype="float32", page_size=PAGE), 8)
    cache = BatchCache(by_memory([PagedCache(pages, seen=3)]))
    states = torch.zeros(1, 2, 2, 8)
    with pytest.raises(ValueError, match="2 tokens a row"):
        cache.update(states, states, 0)
