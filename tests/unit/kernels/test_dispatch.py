"""What the public kernels refuse, by which words, and that a refusal changes nothing."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from bench.kernel_cases import Shape, empty_arena, make_case
from radixkv.errors import BadRequest
from radixkv.kernels import append, checks, copy_rows, decode_attention

HALF, INT = torch.float16, torch.int32


def decode_case() -> dict[str, Tensor]:
    case = make_case(Shape([20, 0, 16]), fill=0.0)
    return dict(zip(("q", "k_pages", "v_pages", "page_table", "lengths"), case.arguments, strict=True))


def with_entry(table: Tensor, page: int) -> Tensor:
    table = table.clone()
    table[0, 1] = page
    return table


DECODE_ERRORS = {
    "q has the wrong number of dimensions": lambda a: {"q": a["q"][0]},
    "k_pages has the wrong number of dimensions": lambda a: {"k_pages": a["k_pages"][0]},
    "q and the pages differ in head dim": lambda a: {"q": a["q"][..., :63]},
    "q and the pages differ in dtype": lambda a: {"q": a["q"].to(HALF)},
    "v_pages and the pages differ in dtype": lambda a: {"v_pages": a["v_pages"].to(HALF)},
    "dtype torch.float64; allowed": lambda a: {"k_pages": a["k_pages"].double()},
    "not one shape": lambda a: {"v_pages": a["v_pages"][:, :8]},
    "not one shape ": lambda a: {"k_pages": a["k_pages"][:0], "v_pages": a["v_pages"][:0]},
    "not a multiple of the KV heads": lambda a: {"q": a["q"][:, :3]},
    "not a multiple of the KV heads ": lambda a: {"q": a["q"][:, :0]},
    "page_table is not a 2-dimensional torch.int32": lambda a: {"page_table": a["page_table"].long()},
    "page_table is not a 2-dimensional torch.int32 ": lambda a: {"page_table": a["page_table"][0]},
    "lengths is not a 1-dimensional torch.int32": lambda a: {"lengths": a["lengths"].long()},
    "differ in rows": lambda a: {"lengths": a["lengths"][:2]},
    "differ in rows ": lambda a: {"page_table": a["page_table"][:2]},
    "lengths and the pages are on different devices": lambda a: {"lengths": a["lengths"].to("meta")},
    "too wide": lambda a: {"page_table": a["page_table"][:, :1].expand(-1, 2**28)},
    "beyond the page table": lambda a: {"lengths": torch.tensor([20, 0, 3 * 16 + 1], dtype=INT)},
    "a length is negative": lambda a: {"lengths": torch.tensor([20, -1, 16], dtype=INT)},
    "not in the pool .*page=-1": lambda a: {"page_table": with_entry(a["page_table"], -1)},
    "not in the pool .*page=5": lambda a: {"page_table": with_entry(a["page_table"], 5)},
    "not one of auto, triton, torch": lambda a: {"impl": "cuda"},
    "need CUDA tensors": lambda a: {"impl": "triton"},
}


@pytest.mark.parametrize("says", DECODE_ERRORS)
def test_decode_refuses(says: str) -> None:
    arguments = decode_case()
    decode_attention(**arguments)
    with pytest.raises(BadRequest, match=says.strip()) as caught:
        decode_attention(**{**arguments, **DECODE_ERRORS[says](arguments)})
    assert caught.value.code == "bad_request"


def test_entries_behind_the_length_are_not_looked_at() -> None:
    arguments = decode_case()
    assert decode_attention(**{**arguments, "lengths": torch.tensor([16, 0, 16], dtype=INT)}).isfinite().all()
    table = with_entry(arguments["page_table"], 2**31 - 1)
    decode_attention(**{**arguments, "page_table": table, "lengths": torch.tensor([16, 0, 16], dtype=INT)})
    with pytest.raises(BadRequest, match="not in the pool"):
        decode_attention(**{**arguments, "page_table": table, "lengths": torch.tensor([17, 0, 16], dtype=INT)})


def test_the_last_entry_of_a_row_near_the_most_tokens_is_looked_at() -> None:
    page_size = 3 * 2**20
    length = torch.tensor([682 * page_size], dtype=INT)  # and a page more is beyond int32
    table = torch.full((1, 682), 7, dtype=INT)
    checks.decode_values(table, length, (8, page_size), (1, 1))
    with pytest.raises(BadRequest, match=r"not in the pool .*page=7"):
        checks.decode_values(table, length, (7, page_size), (1, 1))


def append_case() -> dict[str, Tensor]:
    arena = empty_arena(Shape([], page_size=4).layout, 3, 0.0)
    tokens = torch.ones(2, 3, 2, 64)
    return {
        "k": tokens[0], "v": tokens[1], "k_pages": arena[:, 0, 0], "v_pages": arena[:, 0, 1],
        "slots": torch.tensor([0, 11, -1]),
    }  # fmt: skip


APPEND_ERRORS = {
    "k has the wrong number of dimensions": lambda a: {"k": a["k"][0]},
    r"not \[tokens, kv_heads, head_dim\]": lambda a: {"k": a["k"][:, :1], "v": a["v"][:, :1]},
    r"not \[tokens, kv_heads, head_dim\] ": lambda a: {"v": a["v"][:2]},
    "v and the pages differ in dtype": lambda a: {"v": a["v"].to(HALF)},
    "slots and k differ in tokens": lambda a: {"slots": a["slots"][:2]},
    "slots is not a 1-dimensional torch.int64": lambda a: {"slots": a["slots"].int()},
    "slots and the pages are on different devices": lambda a: {"slots": a["slots"].to("meta")},
    "not in the pool .*slot=12": lambda a: {"slots": torch.tensor([0, 12, -1])},
    "not in the pool .*slot=-2": lambda a: {"slots": torch.tensor([0, 1, -2])},
    "need CUDA tensors": lambda a: {"impl": "triton"},
}


@pytest.mark.parametrize("says", APPEND_ERRORS)
def test_append_refuses_and_writes_nothing(says: str) -> None:
    arguments = append_case()
    with pytest.raises(BadRequest, match=says.strip()):
        append(**{**arguments, **APPEND_ERRORS[says](arguments)})
    assert not arguments["k_pages"].any()
    assert not arguments["v_pages"].any()
    append(**arguments)
    assert arguments["k_pages"][[0, 2], [0, 3]].all()


def rows_of(*entries: tuple[int, ...]) -> Tensor:
    return torch.tensor(entries, dtype=INT)


COPY_ERRORS = {
    "4 to 6 dimensions": lambda arena: (arena[0, 0, 0], rows_of((0, 1, 1))),
    "4 to 6 dimensions ": lambda arena: (arena[None], rows_of((0, 1, 1))),
    "empty dimension": lambda arena: (arena[:, :0], rows_of((0, 1, 1))),
    "dtype torch.int32; allowed": lambda arena: (arena.view(torch.int32), rows_of((0, 1, 1))),
    "source page, target page, rows": lambda arena: (arena, rows_of((0, 1))),
    "rows is not a 2-dimensional torch.int32": lambda arena: (arena, rows_of((0, 1, 1)).long()),
    "rows is not a 2-dimensional torch.int32 ": lambda arena: (arena, rows_of((0, 1, 1))[0]),
    "on different devices": lambda arena: (arena, rows_of((0, 1, 1)).to("meta")),
    "source page .*value=-1": lambda arena: (arena, rows_of((0, 1, 1), (-1, 1, 1))),
    "source page .*value=3, most=2": lambda arena: (arena, rows_of((3, 1, 1), (0, 1, 1))),
    "target page .*value=3": lambda arena: (arena, rows_of((0, 3, 1))),
    "row count .*value=5, most=4": lambda arena: (arena, rows_of((0, 1, 5))),
    "row count .*value=-4": lambda arena: (arena, rows_of((0, 1, -4))),
}


@pytest.mark.parametrize("says", COPY_ERRORS)
def test_copy_rows_refuses_and_copies_nothing(says: str) -> None:
    arena = empty_arena(Shape([], page_size=4).layout, 3, 0.0)
    arena[0] = 1
    pages, rows = COPY_ERRORS[says](arena)
    with pytest.raises(BadRequest, match=says.strip()):
        copy_rows(pages, rows)
    assert not arena[1:].any()
    with pytest.raises(BadRequest, match="need CUDA tensors"):
        copy_rows(arena, rows_of((0, 1, 1)), impl="triton")


ONLY_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"msgspec", "zmq", "xxhash", "structlog", "rich", "cyclopts", "triton"}:
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Refuse())
import torch
import radixkv.kernels as kernels

pages = torch.zeros(2, 16, 1, 64)
kernels.append(torch.ones(1, 1, 64), torch.ones(1, 1, 64), pages, pages.clone(), torch.tensor([3]))
out = kernels.decode_attention(
    torch.ones(1, 1, 64), pages, pages, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
)
kernels.copy_rows(pages, torch.tensor([[0, 1, 4]], dtype=torch.int32))
assert pages[1, 3, 0, 0] == 1
print("radixkv.commands" in sys.modules)
"""


def test_kernels_need_nothing_but_torch_on_a_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONLY_TORCH], capture_output=True, text=True, check=False, env={**os.environ}
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
