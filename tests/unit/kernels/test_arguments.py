"""What is no strided torch tensor is refused by name, whichever argument of whichever kernel it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.kernel_cases import Shape, make_case
from radixkv.errors import BadRequest
from radixkv.kernels import (
    Rotary,
    append,
    copy_rows,
    decode_attention,
    gather_pages,
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
    if kernel == "append":
        given["rotary"] = Rotary(*(given.pop(name) for name in ("cos", "sin", "positions")))
    function(**given)


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
