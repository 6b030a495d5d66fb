"""Tokens in a tensor. A file of its own, because the suite's pure part loads no torch."""

import pytest
import torch

from radixkv.client.tokens import pack
from radixkv.errors import BadRequest


def test_a_tensor_packs_like_anything_else() -> None:
    assert pack(torch.tensor([1, 0, 2**32 - 1])) == bytes.fromhex("0100000000000000ffffffff")


@pytest.mark.parametrize("tokens", [torch.tensor([[1]]), torch.tensor([0.5]), torch.tensor([-1])], ids=repr)
def test_what_is_no_row_of_ids_is_a_bad_request(tokens: torch.Tensor) -> None:
    with pytest.raises(BadRequest):
        pack(tokens)
