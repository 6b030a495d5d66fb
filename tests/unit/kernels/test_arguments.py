"""What is no strided torch tensor, or no number, is refused by name, whichever argument of whichever kernel it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.kernel_cases import Shape, make_case
from radixkv.errors import BadRequest
from radixkv.kernels import (
    QuantizedPages,
    Rotary,
    append,
    copy_rows,
    decode_attention,
    gather_pages,
    group_prefixes,
    mla_decode_attention,
    prefill_attention,
    scatter_pages,
)

INT = torch.int32
NAMES = ("q", "k_pages", "v_pages", "page_table", "lengths")
DECODE = dict(zip(NAMES, make_case(Shape([20, 3], queries=2)).arguments, strict=True))
PREFILL = dict(zip(NAMES, make_case(Shape([20, 3], new_tokens=[5, 2])).arguments, strict=True))
PAGES, ARENA = (DECODE["k_pages"], DECODE["v_pages"]), make_case(Shape([20, 3])).arena
STAGING = torch.zeros(2, *ARENA.shape[1:])
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "decode": (decode_attention, DECODE | {
        "tree_mask": torch.ones(2, 2, dtype=torch.bool), "sinks": torch.zeros(4), "alibi_slopes": torch.zeros(4)}),
    "prefill": (prefill_attention, PREFILL | {"starts": torch.tensor([0, 5, 7], dtype=INT)}),
    "latent": (mla_decode_attention, {
        "q": torch.zeros(1, 16, 80), "pages": torch.zeros(3, 16, 80), "page_table": torch.zeros(1, 2, dtype=INT),
        "lengths": torch.tensor([20], dtype=INT), "latent_dim": 64, "scale": 0.1}),
    "append": (append, {
        "k": torch.zeros(3, 2, 64), "v": torch.zeros(3, 2, 64), "k_pages": PAGES[0], "v_pages": PAGES[1],
        "slots": torch.tensor([0, 1, -1]), "q": torch.zeros(3, 4, 64),
        "cos": torch.ones(9, 8), "sin": torch.zeros(9, 8), "positions": torch.tensor([0, 1, 2])}),
    "copy_rows": (copy_rows, {"pages": ARENA, "rows": torch.zeros(2, 3, dtype=INT)}),
    "gather": (gather_pages, {"pages": ARENA, "ids": torch.tensor([0, 1], dtype=INT), "staging": STAGING}),
    "scatter": (scatter_pages, {"pages": ARENA, "ids": torch.tensor([0, 1], dtype=INT), "staging": STAGING}),
}  # fmt: skip
EACH = [(kernel, name) for kernel, (_, given) in CALLS.items() for name, value in given.items()
        if isinstance(value, Tensor)]  # fmt: skip


MAY_BE_NONE = {("decode", "tree_mask"), ("decode", "sinks"), ("decode", "alibi_slopes"), ("append", "q")}


def call(kernel: str, **changed: Any) -> None:
    function, given = CALLS[kernel]
    given = given | changed
    if kernel == "append" and "rotary" not in changed:
        given["rotary"] = Rotary(*(given[name] for name in ("cos", "sin", "positions")))
    function(**{name: value for name, value in given.items() if name not in {"cos", "sin", "positions"}})


@pytest.mark.parametrize("kernel", CALLS)
def test_as_they_are_they_are_taken(kernel: str) -> None:
    call(kernel)


@pytest.mark.parametrize(("kernel", "name"), EACH)
def test_it_refuses_what_is_no_strided_tensor(kernel: str, name: str) -> None:
    right = CALLS[kernel][1][name]
    for wrong in (right.numpy(), right.tolist(), 3, *([] if (kernel, name) in MAY_BE_NONE else [None])):
        with pytest.raises(BadRequest, match=f"^{name} is not a torch tensor"):
            call(kernel, **{name: wrong})
    with pytest.raises(BadRequest, match=f"^{name} is not a strided tensor"):
        call(kernel, **{name: right.to_sparse()})
    with pytest.raises(BadRequest, match=r"on different devices|is not a"):
        call(kernel, **{name: right.to("meta")})


@pytest.mark.parametrize(("kernel", "name"), [each for each in EACH if CALLS[each[0]][1][each[1]].is_floating_point()])
def test_it_refuses_what_asks_for_gradients(kernel: str, name: str) -> None:
    asking = CALLS[kernel][1][name].detach().clone().requires_grad_()
    with pytest.raises(BadRequest, match=f"^{name} requires gradients"):
        call(kernel, **{name: asking})
    with torch.no_grad():
        call(kernel, **{name: asking})


QUANTIZED = QuantizedPages(torch.zeros(3, 4, 2, 8, dtype=torch.int8), torch.zeros(3, 4, 2, 1))


@pytest.mark.parametrize(("kernel", "name"), [each for each in EACH if not each[1].endswith("pages")])
def test_it_refuses_quantized_pages_where_none_are_meant(kernel: str, name: str) -> None:
    with pytest.raises(BadRequest, match=f"^{name} is not a torch tensor .*QuantizedPages"):
        call(kernel, **{name: QUANTIZED})


NUMBERS = {
    ("decode", "scale"): ("0.1", 1j, True, torch.tensor(0.1), 2.0**101, -1e39, float("nan")),
    ("decode", "softcap"): ("3", True, torch.tensor(5.0), 1e-40, 2.0**101, 1e300),
    ("decode", "window"): (1.5, "3", True, torch.tensor(3), 3.0),
    ("prefill", "window"): (1.5, True),
    ("latent", "latent_dim"): (64.0, "64", True, torch.tensor(64), None),
    ("latent", "scale"): (None, "0.1", float("inf")),
}


@pytest.mark.parametrize(("kernel", "name"), NUMBERS)
def test_it_refuses_what_is_no_number_or_beyond_float32(kernel: str, name: str) -> None:
    for wrong in NUMBERS[kernel, name]:
        with pytest.raises(BadRequest, match=f"^{name} is not a"):
            call(kernel, **{name: wrong})


def test_numpy_numbers_are_numbers() -> None:
    call("decode", scale=np.float32(0.5), softcap=np.int64(30), window=np.int32(3))
    call("latent", latent_dim=np.int64(64), scale=1)


def test_it_refuses_other_things_in_the_place_of_prefixes_and_rotary_embeddings() -> None:
    with pytest.raises(BadRequest, match=r"prefixes are not what group_prefixes gives .*Tensor"):
        call("decode", prefixes=torch.zeros(4, 4))
    with pytest.raises(BadRequest, match=r"rotary is not a Rotary .*tuple"):
        call("append", rotary=tuple(CALLS["append"][1][name] for name in ("cos", "sin", "positions")))
    with pytest.raises(BadRequest, match="k_pages's codes is not a torch tensor"):
        call("decode", k_pages=QuantizedPages(None))  # type: ignore[arg-type]


def test_groups_are_made_of_int32_tensors_and_whole_numbers() -> None:
    table, lengths = torch.zeros(2, 3, dtype=INT), torch.tensor([4, 12], dtype=INT)
    for wrong in (
        (table.numpy(), lengths, 4), (table, lengths.tolist(), 4), (table.long(), lengths, 4),
        (table, lengths.float(), 4), (table, lengths, 0), (table, lengths, "4"), (table, lengths, 4.0),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match=r"is not a|not torch.int32"):
            group_prefixes(*wrong)
    for more in ({"queries": 1.5}, {"window": 2.5}, {"window": True}):
        with pytest.raises(BadRequest, match="is not an integer"):
            group_prefixes(table, lengths, 4, **more)


@pytest.mark.parametrize("kernel", ["append", "copy_rows", "scatter"])
def test_what_is_written_has_a_place_for_each_element(kernel: str) -> None:
    name = "k_pages" if kernel == "append" else "pages"
    pages = CALLS[kernel][1][name]
    with pytest.raises(BadRequest, match=f"^elements of {name} lie in one place"):
        call(kernel, **{name: pages[:1].expand(pages.shape)})
    call(kernel, **{name: pages[:1].as_strided(pages[:1].shape, (0, *pages.stride()[1:]))}, **(
        {"rows": torch.zeros(2, 3, dtype=INT)} if kernel == "copy_rows" else
        {"slots": torch.tensor([0, 1, -1]), "v_pages": PAGES[1][:1]} if kernel == "append" else
        {"ids": torch.tensor([0, -1], dtype=INT)}
    ))  # fmt: skip


def test_what_is_written_is_not_what_is_read() -> None:
    inside = torch.zeros(4, 4, 2, 64)
    with pytest.raises(BadRequest, match=r"^v lies in the memory of k_pages"):
        append(torch.zeros(3, 2, 64), inside[1, :3], inside, torch.zeros_like(inside), torch.tensor([0, 1, 2]))
    for move in (gather_pages, scatter_pages):
        ids = torch.tensor([0, 3], dtype=INT)
        with pytest.raises(BadRequest, match=r"^staging lies in the memory of pages"):
            move(pages=inside, ids=ids, staging=inside[1:3])
    gather_pages(inside[2:], torch.tensor([1, 0], dtype=INT), inside[:2])  # one memory, two parts of it
