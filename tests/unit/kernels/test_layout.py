"""Views on an arena: each element at the address the descriptor says, no copy, and bad buffers refused."""

import dataclasses
import itertools
import mmap
import struct

import pytest
import torch

from radixkv.config import KVSpec, Layout
from radixkv.errors import BadRequest
from radixkv.kernels import arena_view, views

SPEC = KVSpec(layers=2, kv_heads=3, head_dim=5, dtype="float32", page_size=4)
PAGES = 3
DEFAULT = Layout.of(SPEC)
# [page][kv][layer][kv_head][dim][token]: the order of the dimensions turned around where that is possible.
OTHER = dataclasses.replace(
    DEFAULT, kv_stride=2 * 60, layer_stride=60, head_stride=20, dim_stride=4, token_stride=1,
    order=("page", "kv", "layer", "kv_head", "dim", "token"),
)  # fmt: skip


@pytest.mark.parametrize("layout", [DEFAULT, OTHER], ids=["default", "other"])
def test_each_element_lies_where_the_descriptor_says(layout: Layout) -> None:
    memory = bytearray(PAGES * SPEC.page_bytes)
    layers = views(memory, layout, PAGES)
    assert [pages.keys.shape for pages in layers] == [(PAGES, 4, 3, 5)] * 2
    sizes = (range(PAGES), range(2), range(2), range(4), range(3), range(5))
    seen = set()
    for number, (page, layer, kind, token, head, dim) in enumerate(itertools.product(*sizes)):
        layers[layer][kind][page, token, head, dim] = number
        at = (
            page * layout.page_stride + layer * layout.layer_stride + kind * layout.kv_stride
            + token * layout.token_stride + head * layout.head_stride + dim * layout.dim_stride
        )  # fmt: skip
        assert struct.unpack_from("=f", memory, at * 4) == (number,)
        seen.add(at)
    assert len(seen) == PAGES * 2 * 2 * 4 * 3 * 5
    assert torch.equal(arena_view(memory, layout, PAGES)[:, 1, 0], layers[1].keys)


def test_pages_begin_at_multiples_of_256_bytes_from_offset_0() -> None:
    arena = arena_view(bytearray(PAGES * SPEC.page_bytes), DEFAULT, PAGES)
    base = arena.data_ptr()
    assert [arena[page].data_ptr() - base for page in range(PAGES)] == [0, SPEC.page_bytes, 2 * SPEC.page_bytes]
    assert SPEC.page_bytes % 256 == 0
    assert SPEC.page_bytes > 2 * 2 * 4 * 3 * 5 * 4  # this spec is padded


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_mapping_a_memoryview_and_a_tensor_show_the_same_memory(dtype: str) -> None:
    spec = dataclasses.replace(SPEC, dtype=dtype)
    with mmap.mmap(-1, PAGES * spec.page_bytes) as memory:
        mapped = arena_view(memory, Layout.of(spec), PAGES)
        mapped[2, 1, 1, 3, 2, 4] = 7
        seen = arena_view(memoryview(memory), Layout.of(spec), PAGES)
        raw = torch.frombuffer(memory, dtype=torch.uint8)
        shifted = torch.cat([torch.zeros(256, dtype=torch.uint8), raw])[256:]
        assert seen[2, 1, 1, 3, 2, 4] == arena_view(raw, Layout.of(spec), PAGES)[2, 1, 1, 3, 2, 4] == 7
        assert torch.equal(arena_view(shifted, Layout.of(spec), PAGES), mapped)
        with pytest.raises(BufferError):  # a view keeps the mapping
            memory.close()
        del mapped, seen, raw


def bad_buffers() -> list[tuple[str, object]]:
    enough = PAGES * SPEC.page_bytes
    raw = torch.zeros(2 * enough, dtype=torch.uint8)
    closed = mmap.mmap(-1, enough)
    closed.close()
    return [
        ("too small", bytearray(enough - 256)),
        ("read-only", bytes(enough)),
        ("empty", bytearray()),
        ("not contiguous", memoryview(bytearray(2 * enough))[::2]),
        ("uint8", raw.view(torch.float32)),
        ("one-dimensional", raw.view(2, -1)),
        ("contiguous", raw[::2]),
        ("multiple of the element size", raw[1:]),
        ("multiple of the element size", memoryview(bytearray(2 * enough))[1:]),
        ("there is no buffer", None),
        ("there is no buffer", "pages"),
        ("there is no buffer: mmap closed", closed),
    ]


@pytest.mark.parametrize(("says", "buffer"), bad_buffers())
def test_a_bad_buffer_is_refused(says: str, buffer: object) -> None:
    with pytest.raises(BadRequest, match=says):
        views(buffer, DEFAULT, PAGES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("says", "changes", "pages"),
    [
        ("int4", {"dtype": "int4"}, PAGES),
        ("at least 1", {}, 0),
        ("at least 1", {"head_stride": 0}, PAGES),
        ("at least 1", {"token_stride": -5}, PAGES),
        ("too small", {"page_stride": 10 * DEFAULT.page_stride}, PAGES),
        ("places of an arena overlap", {"page_stride": DEFAULT.layer_stride}, PAGES),
        ("places of an arena overlap", {"kv_stride": DEFAULT.kv_stride - 1}, PAGES),
        ("pages is not an integer", {}, 3.0),
        ("pages is not an integer", {}, None),
    ],
)
def test_an_impossible_layout_is_refused(says: str, changes: dict[str, object], pages: int) -> None:
    layout = dataclasses.replace(DEFAULT, **changes)
    with pytest.raises(BadRequest, match=says):
        views(bytearray(PAGES * SPEC.page_bytes), layout, pages)


def test_the_last_page_may_end_without_its_padding() -> None:
    used = (PAGES - 1) * SPEC.page_bytes + 2 * 2 * 4 * 3 * 5 * 4
    assert len(views(bytearray(used), DEFAULT, PAGES)) == 2
    with pytest.raises(BadRequest, match="too small"):
        views(bytearray(used - 1), DEFAULT, PAGES)
