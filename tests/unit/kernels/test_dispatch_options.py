"""What the kernels refuse beside the plain decode's arguments, by which words, and that a refusal changes nothing."""

from typing import Any

import pytest
import torch

from bench.kernel_cases import Shape, empty_arena, make_case
from radixkv.errors import BadRequest
from radixkv.kernels import (
    Rotary,
    append,
    decode_attention,
    gather_pages,
    group_prefixes,
    prefill_attention,
    scatter_pages,
)

HALF, INT = torch.float16, torch.int32
Arguments = dict[str, Any]


def decode_case() -> Arguments:
    case = make_case(Shape([20, 9, 16], queries=3), fill=0.0)
    return dict(zip(("q", "k_pages", "v_pages", "page_table", "lengths"), case.arguments, strict=True))


def prefixes_of(a: Arguments, page_size: int = 16, rows: int = 3, **more: Any) -> Arguments:
    made = group_prefixes(a["page_table"][:rows], a["lengths"][:rows], page_size, **{"queries": 3, **more})
    return {"prefixes": made}


OPTION_ERRORS = {
    "query tokens a row .*queries=9": lambda a: {"q": a["q"].repeat(1, 3, 1, 1)},
    "query tokens a row .*queries=0": lambda a: {"q": a["q"][:, :0]},
    "scale is not a finite": lambda a: {"scale": float("inf")},
    "softcap is not a positive": lambda a: {"softcap": 0.0},
    "softcap is not a positive ": lambda a: {"softcap": float("nan")},
    "window is out of range": lambda a: {"window": 0},
    "window is out of range ": lambda a: {"window": 2**31},
    "sinks is not a contiguous float32": lambda a: {"sinks": torch.zeros(3)},
    "sinks is not a contiguous float32 ": lambda a: {"sinks": torch.zeros(4, dtype=HALF)},
    "alibi_slopes is not a contiguous float32": lambda a: {"alibi_slopes": torch.zeros(8)[::2]},
    "alibi_slopes and the pages are on different devices": lambda a: {"alibi_slopes": torch.zeros(4, device="meta")},
    "tree_mask needs q of": lambda a: {"q": a["q"][:, 0], "tree_mask": torch.ones(1, 1).bool()},
    "tree_mask is not bool": lambda a: {"tree_mask": torch.ones(3, 3)},
    "tree_mask is not bool ": lambda a: {"tree_mask": torch.ones(2, 3, 3).bool()},
    "tree_mask and the pages are on different devices": lambda a: {"tree_mask": torch.ones(3, 3, device="meta").bool()},
    "another rows": lambda a: prefixes_of(a, rows=2),
    "another page size": lambda a: prefixes_of(a | {"lengths": a["lengths"] // 2}, 8),
    "another query tokens a row": lambda a: prefixes_of(a, queries=2),
    "another window": lambda a: prefixes_of(a, window=7),
    "prefixes and the pages are on different devices": lambda a: prefixes_of(a, device="meta"),
    "more than one query token a row": lambda a: prefixes_of(a, queries=1)
    | {"q": a["q"][:, :1], "tree_mask": torch.ones(1, 1).bool()},
}  # fmt: skip


@pytest.mark.parametrize("says", OPTION_ERRORS)
def test_decode_refuses_options(says: str) -> None:
    arguments = decode_case()
    decode_attention(**arguments, **prefixes_of(arguments))
    with pytest.raises(BadRequest, match=says.strip()):
        decode_attention(**{**arguments, **OPTION_ERRORS[says](arguments)})


def test_an_unknown_option_is_an_error_of_the_caller() -> None:
    with pytest.raises(TypeError, match="logits_cap"):
        decode_attention(**decode_case(), logits_cap=1.0)


def prefill_case() -> Arguments:
    case = make_case(Shape([20, 9, 16], new_tokens=[5, 0, 16]), fill=0.0)
    names = ("q", "k_pages", "v_pages", "page_table", "lengths", "starts")
    return dict(zip(names, (*case.arguments, case.starts), strict=True))


def starts_of(*starts: int) -> Arguments:
    return {"starts": torch.tensor(starts, dtype=INT)}


PREFILL_ERRORS = {
    "q has the wrong number of dimensions": lambda a: {"q": a["q"][None]},
    "starts is not a 1-dimensional torch.int32": lambda a: {"starts": a["starts"].long()},
    "starts has not one entry more": lambda a: {"starts": a["starts"][:3]},
    "starts has not one entry more ": lambda a: {"page_table": a["page_table"][:2]},
    "starts is not contiguous": lambda a: {"starts": a["starts"].repeat_interleave(2)[::2]},
    "starts do not ascend": lambda a: starts_of(1, 5, 5, 21),
    "starts do not ascend ": lambda a: starts_of(0, 5, 4, 20),
    "starts do not ascend from": lambda a: starts_of(0, 5, 5, 22),
    "more new tokens than tokens .*new=10, length=9": lambda a: starts_of(0, 5, 15, 21),
    "a page id is not in the pool": lambda a: {"page_table": torch.full_like(a["page_table"], 99)},
    "q and the pages differ in dtype": lambda a: {"q": a["q"].to(HALF)},
    "window is out of range": lambda a: {"window": -1},
    "need CUDA tensors": lambda a: {"impl": "triton"},
}


@pytest.mark.parametrize("says", PREFILL_ERRORS)
def test_prefill_refuses(says: str) -> None:
    arguments = prefill_case()
    prefill_attention(**arguments)
    with pytest.raises(BadRequest, match=says.strip()):
        prefill_attention(**{**arguments, **PREFILL_ERRORS[says](arguments)})


def rotary_case() -> Arguments:
    arena = empty_arena(Shape([], page_size=4).layout, 3, 0.0)
    ones = torch.ones(3, 2, 64)
    return {
        "k": ones, "v": ones, "k_pages": arena[:, 0, 0], "v_pages": arena[:, 0, 1], "slots": torch.tensor([0, 11, -1]),
        "q": torch.ones(3, 4, 64), "rotary": Rotary(torch.ones(9, 32), torch.zeros(9, 32), torch.tensor([0, 8, 1])),
    }  # fmt: skip


def turned(a: Arguments, **fields: Any) -> Arguments:
    return {"rotary": a["rotary"]._replace(**fields)}


ROTARY_ERRORS = {
    "positions is not a 1-dimensional torch.int64": lambda a: turned(a, positions=torch.zeros(3, dtype=INT)),
    "positions are not one a token": lambda a: turned(a, positions=torch.zeros(4).long()),
    "cos and sin are not one shape": lambda a: turned(a, cos=torch.ones(9, 16)),
    "cos and sin are not one shape ": lambda a: turned(a, cos=torch.ones(9, 33), sin=torch.ones(9, 33)),
    "sin is not contiguous": lambda a: turned(a, sin=torch.ones(9, 64)[:, ::2]),
    "cos is not contiguous or of no dtype": lambda a: turned(a, cos=torch.ones(9, 32).double()),
    "cos and the pages are on different devices": lambda a: turned(a, cos=torch.ones(9, 32, device="meta")),
    "a position has no angles .*position=9, angles=9": lambda a: turned(a, positions=torch.tensor([0, 9, 1])),
    "a position has no angles .*position=-1": lambda a: turned(a, positions=torch.tensor([0, 1, -1])),
    "no rotary embedding": lambda a: {"rotary": None},
    "q and the pages differ in dtype": lambda a: {"q": a["q"].to(HALF)},
    "q is not .tokens": lambda a: {"q": a["q"][:2]},
}


@pytest.mark.parametrize("says", ROTARY_ERRORS)
def test_append_refuses_a_rotary_embedding_and_writes_nothing(says: str) -> None:
    arguments = rotary_case()
    with pytest.raises(BadRequest, match=says.strip()):
        append(**{**arguments, **ROTARY_ERRORS[says](arguments)})
    assert not arguments["k_pages"].any()
    assert not arguments["v_pages"].any()
    append(**arguments)
    assert arguments["k_pages"][[0, 2], [0, 3]].all()


def move_case() -> Arguments:
    arena = empty_arena(Shape([], page_size=4, head_dim=8).layout, 3, 0.0)
    return {"pages": arena, "ids": torch.tensor([2, -1], dtype=INT), "staging": torch.ones(2, *arena.shape[1:])}


MOVE_ERRORS = {
    "4 to 6 dimensions": lambda a: {"pages": a["pages"][0, 0, 0]},
    "ids is not a 1-dimensional torch.int32": lambda a: {"ids": a["ids"].long()},
    "staging has the wrong number of dimensions": lambda a: {"staging": a["staging"][0]},
    "staging and the pages differ in dtype": lambda a: {"staging": a["staging"].to(HALF)},
    "staging and the pages are on different devices": lambda a: {"staging": a["staging"].to("meta")},
    "not a contiguous tensor of a page for each id": lambda a: {"staging": a["staging"][:1]},
    "not a contiguous tensor of a page for each id ": lambda a: {"staging": a["staging"].transpose(3, 4)},
    "not a contiguous tensor of a page for each id  ": lambda a: {
        "staging": a["staging"].repeat(2, 1, 1, 1, 1, 1)[::2]
    },
    "a page id is not in the pool .*page=3": lambda a: {"ids": torch.tensor([0, 3], dtype=INT)},
    "a page id is not in the pool .*page=-2": lambda a: {"ids": torch.tensor([0, -2], dtype=INT)},
    "need CUDA tensors": lambda a: {"impl": "triton"},
}


@pytest.mark.parametrize("says", MOVE_ERRORS)
def test_gather_and_scatter_refuse_and_move_nothing(says: str) -> None:
    arguments = move_case()
    for move in (gather_pages, scatter_pages):
        with pytest.raises(BadRequest, match=says.strip()):
            move(**{**arguments, **MOVE_ERRORS[says](arguments)})
    assert not arguments["pages"].any()
    assert arguments["staging"].all()
    gather_pages(**arguments)
    assert not arguments["staging"][0].any()
    assert arguments["staging"][1].all()
