"""What the kernels accept. Each function raises BadRequest saying which argument is wrong, and returns nothing.

Shapes, dtypes, strides and devices are known on the host and are always checked. Values (lengths, page ids, slots) lie
in tensors: on a CPU they are always checked, on a CUDA device only on demand, since that waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixkv.config import QUANTIZED
from radixkv.errors import BadRequest
from radixkv.kernels import arguments
from radixkv.kernels.layout import DTYPES
from radixkv.kernels.options import QUERIES_MAX, Attention, Rotary
from radixkv.kernels.prefixes import SharedPrefixes
from radixkv.kernels.quantized import SCALES, Pages, QuantizedPages

IMPLEMENTATIONS = ("auto", "triton", "torch")
TOKENS_MAX = 2**31 - 2**16
"""Tokens a page table may hold: positions are int32 in the kernels, also that of the end of the last of a row's slices,
of which each may be up to a block of 64 tokens too long: the largest devices have some 600."""
SIZE_MAX = 2.0**100
"""Of a scale, a soft cap and its inverse: what they are multiplied with stays far from the ends of float32."""


def decode_shapes(q: Tensor, k_pages: Pages, v_pages: Pages, page_table: Tensor, lengths: Tensor) -> None:
    _pages(k_pages, v_pages)
    _tensor("q", q, (3, 4), k_pages)
    _batch(q, k_pages, page_table, lengths)
    if q.dim() == 4 and not 1 <= q.shape[1] <= QUERIES_MAX:
        raise BadRequest("query tokens a row are out of range", queries=q.shape[1], most=QUERIES_MAX)
    if page_table.shape[0] != q.shape[0] or lengths.shape[0] != q.shape[0]:
        raise BadRequest(
            "q, page_table and lengths differ in rows",
            q=q.shape[0], page_table=page_table.shape[0], lengths=lengths.shape[0],
        )  # fmt: skip


def latent_shapes(pages: Tensor, latent_dim: int) -> None:
    _tensor("pages", pages, (3,), pages)
    if not 1 <= latent_dim < pages.shape[2]:
        raise BadRequest("latent_dim is not a part of the pages' dims", latent_dim=latent_dim, dims=pages.shape[2])


def prefill_shapes(
    q: Tensor, k_pages: Pages, v_pages: Pages, page_table: Tensor, lengths: Tensor, starts: Tensor
) -> None:  # fmt: skip
    _pages(k_pages, v_pages)
    _tensor("q", q, (3,), k_pages)
    _batch(q, k_pages, page_table, lengths)
    _integers("starts", starts, 1, torch.int32, k_pages)
    if page_table.shape[0] != lengths.shape[0] or starts.shape[0] != lengths.shape[0] + 1:
        raise BadRequest(
            "page_table and lengths differ in rows, or starts has not one entry more",
            page_table=page_table.shape[0], lengths=lengths.shape[0], starts=starts.shape[0],
        )  # fmt: skip
    if not starts.is_contiguous():
        raise BadRequest("starts is not contiguous", stride=starts.stride(0))


def _batch(q: Tensor, k_pages: Pages, page_table: Tensor, lengths: Tensor) -> None:
    _integers("page_table", page_table, 2, torch.int32, k_pages)
    _integers("lengths", lengths, 1, torch.int32, k_pages)
    heads, dim = q.shape[-2:]
    _, page_size, kv_heads, page_dim = k_pages.shape
    if dim != page_dim:
        raise BadRequest("q and the pages differ in head dim", q=dim, pages=page_dim)
    if heads == 0 or heads % kv_heads:
        raise BadRequest("query heads are not a multiple of the KV heads", query_heads=heads, kv_heads=kv_heads)
    if page_table.shape[1] * page_size > TOKENS_MAX:
        raise BadRequest("the page table is too wide", tokens=page_table.shape[1] * page_size, max=TOKENS_MAX)


def options_fit(options: Attention, heads: int, k_pages: Pages) -> None:
    if not abs(options.scale) <= SIZE_MAX:
        raise BadRequest("scale is not a finite number, or too large", scale=options.scale, most=SIZE_MAX)
    if options.softcap is not None and not 1 / SIZE_MAX <= options.softcap <= SIZE_MAX:
        raise BadRequest(
            "softcap is not a positive number, or too large or small",
            softcap=options.softcap, least=1 / SIZE_MAX, most=SIZE_MAX,
        )  # fmt: skip
    if options.window is not None and not 1 <= options.window <= TOKENS_MAX:
        raise BadRequest("window is out of range", window=options.window, most=TOKENS_MAX)
    for name, tensor in (("sinks", options.sinks), ("alibi_slopes", options.alibi_slopes)):
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or tensor.shape != (heads,) or not tensor.is_contiguous():
            raise BadRequest(
                f"{name} is not a contiguous float32 tensor of one number a query head",
                heads=heads, shape=str(list(tensor.shape)), dtype=str(tensor.dtype),
            )  # fmt: skip
        _same_device(name, tensor, k_pages)


def tree_mask_fits(tree_mask: Tensor, q: Tensor) -> None:
    if q.dim() != 4:
        raise BadRequest("tree_mask needs q of [rows, query tokens, heads, head_dim]", dims=q.dim())
    batch, queries = q.shape[:2]
    shapes = ((queries, queries), (batch, queries, queries))
    if tree_mask.dtype != torch.bool or tuple(tree_mask.shape) not in shapes:
        raise BadRequest(
            "tree_mask is not bool [rows, T, T] or [T, T]",
            shape=str(list(tree_mask.shape)), dtype=str(tree_mask.dtype), queries=queries,
        )  # fmt: skip
    _same_device("tree_mask", tree_mask, q)


def prefixes_fit(
    prefixes: SharedPrefixes, page_table: Tensor, page_size: int, per_row: int, options: Attention
) -> None:  # fmt: skip
    """The prefixes were made for such a batch. That they are those of this page table is the caller's word."""
    if not isinstance(prefixes, SharedPrefixes):
        raise BadRequest("prefixes are not what group_prefixes gives", type=type(prefixes).__name__)
    for name, made_for, got in (
        ("rows", prefixes.rows, page_table.shape[0]),
        ("page size", prefixes.page_size, page_size),
        ("query tokens a row", prefixes.per_row, per_row),
        ("window", prefixes.window, options.window),
    ):
        if made_for != got:
            raise BadRequest(f"prefixes were made for another {name}", made_for=str(made_for), got=str(got))
    if options.tree is not None and per_row == 1:
        raise BadRequest("prefixes and tree_mask together need more than one query token a row")
    _same_device("prefixes", prefixes.span_table, page_table)


def prefill_values(starts: Tensor, lengths: Tensor, tokens: int) -> None:
    counts = starts.diff()
    if int(starts[0]) != 0 or int(starts[-1]) > tokens or bool((counts < 0).any()):
        raise BadRequest("starts do not ascend from 0 to at most the tokens of q", tokens=tokens)
    if bool((counts > lengths).any()):
        row = int((counts > lengths).nonzero()[0])
        raise BadRequest("a row has more new tokens than tokens", new=int(counts[row]), length=int(lengths[row]))


def decode_values(
    page_table: Tensor, lengths: Tensor, pages: Sequence[int], sees: tuple[int | Tensor, int | None]
) -> None:
    """Lengths fit the table, and the entries that a row sees are pages of the pool; others are not looked at.

    ``pages``: the shape of the pages. ``sees``: (query tokens of a row, window).
    """
    pool, page_size = pages[:2]
    if lengths.numel() == 0:
        return
    capacity = page_table.shape[1] * page_size
    shortest, longest = (int(end) for end in torch.aminmax(lengths))
    if shortest < 0 or longest > capacity:
        bad = shortest if shortest < 0 else longest
        raise BadRequest("a length is negative or beyond the page table", length=bad, capacity_tokens=capacity)
    if longest == 0:
        return
    queries, window = sees
    first = torch.zeros_like(lengths) if window is None else (lengths - queries + 1 - window).clamp(min=0)
    _entries("a page id", page_table, (first // page_size, (lengths - 1) // page_size), pool)


def prefix_values(prefixes: SharedPrefixes, page_table: Tensor, lengths: Tensor, pages: Sequence[int]) -> None:
    """No row is shorter than what it shares, and of that the entries that it sees, which are read in the first row of
    its group, are pages of the pool."""
    pool, page_size = pages[:2]
    shared = prefixes.span_table[:, : prefixes.shared_spans + 1]
    counts = shared[3].diff()
    row, begin, end = shared[:3, :-1].repeat_interleave(counts, 1)  # for each member of each span
    own = lengths[prefixes.members[: len(end)]]
    if bool((own < end).any()):
        at = int((own < end).nonzero()[0])
        raise BadRequest(
            "a row has become shorter than a prefix that it shares, which asks for new prefixes",
            length=int(own[at]), prefix_tokens=int(end[at]),
        )  # fmt: skip
    if prefixes.window is not None:
        first = torch.maximum(begin, own - prefixes.per_row + 1 - prefixes.window)
        _entries("a page id of a shared prefix", page_table[row], (first // page_size, (end - 1) // page_size), pool)


def _entries(name: str, page_table: Tensor, between: tuple[Tensor, Tensor], pool: int) -> None:
    """The entries of each row from the first to the last of ``between`` are pages of the pool."""
    first, last = between
    entry = torch.arange(page_table.shape[1], device=page_table.device)
    ids = page_table[(entry >= first[:, None]) & (entry <= last[:, None])]
    if len(ids) == 0:
        return
    low, high = (int(end) for end in torch.aminmax(ids))
    if low < 0 or high >= pool:
        raise BadRequest(f"{name} is not in the pool", page=low if low < 0 else high, pages=pool)


def append_shapes(k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, slots: Tensor) -> None:
    _pages(k_pages, v_pages)
    _tensor("k", k, (3,), k_pages)
    _tensor("v", v, (3,), k_pages)
    _integers("slots", slots, 1, torch.int64, k_pages)
    if k.shape != v.shape or k.shape[1:] != k_pages.shape[2:]:
        raise BadRequest(
            "k and v are not [tokens, kv_heads, head_dim] of the pages",
            k=str(list(k.shape)), v=str(list(v.shape)), pages=str(list(k_pages.shape)),
        )  # fmt: skip
    if slots.shape[0] != k.shape[0]:
        raise BadRequest("slots and k differ in tokens", slots=slots.shape[0], k=k.shape[0])
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        for part in _parts(pages):
            _written(name, part, k=k, v=v)


def append_values(slots: Tensor, pages: int, page_size: int) -> None:
    if slots.numel() == 0:
        return
    low, high = (int(end) for end in torch.aminmax(slots))
    if low < -1 or high >= pages * page_size:
        raise BadRequest("a slot is not in the pool", slot=low if low < -1 else high, slots=pages * page_size)


def rotary_fits(rotary: Rotary, k: Tensor, k_pages: Pages) -> None:
    if not isinstance(rotary, Rotary):
        raise BadRequest("rotary is not a Rotary", type=type(rotary).__name__)
    cos, sin, positions, _ = rotary
    arguments.tensors(cos=cos, sin=sin, positions=positions)
    _integers("positions", positions, 1, torch.int64, k_pages)
    if positions.shape[0] != k.shape[0] or not positions.is_contiguous():
        raise BadRequest("positions are not one a token, side by side", positions=positions.shape[0], k=k.shape[0])
    if cos.dim() != 2 or cos.shape != sin.shape or not 1 <= cos.shape[1] <= k.shape[2] // 2:
        raise BadRequest(
            "cos and sin are not one shape [positions, half of the dims that turn]",
            cos=str(list(cos.shape)), sin=str(list(sin.shape)), head_dim=k.shape[2],
        )  # fmt: skip
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tensor.dtype not in DTYPES.values() or not tensor.is_contiguous():
            raise BadRequest(f"{name} is not contiguous or of no dtype that is allowed", dtype=str(tensor.dtype))
        _same_device(name, tensor, k_pages)


def rotary_values(rotary: Rotary) -> None:
    if rotary.positions.numel() == 0:
        return
    low, high = (int(end) for end in torch.aminmax(rotary.positions))
    if low < 0 or high >= rotary.cos.shape[0]:
        raise BadRequest("a position has no angles", position=low if low < 0 else high, angles=rotary.cos.shape[0])


def query_fits(q: Tensor, k: Tensor, rotary: Rotary | None) -> None:
    if rotary is None:
        raise BadRequest("q is given to be turned, but no rotary embedding")
    _tensor("q", q, (3,), k)
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise BadRequest(
            "q is not [tokens, query_heads, head_dim] beside k", q=str(list(q.shape)), k=str(list(k.shape))
        )  # fmt: skip


def move_shapes(pages: Tensor, ids: Tensor, staging: Tensor) -> None:
    _any_view(pages)
    _integers("ids", ids, 1, torch.int32, pages)
    _movable("staging", staging, (pages.dim(),), pages)
    if staging.shape[0] != ids.shape[0] or staging.shape[1:] != pages.shape[1:] or not staging.is_contiguous():
        raise BadRequest(
            "staging is not a contiguous tensor of a page for each id",
            staging=str(list(staging.shape)), ids=ids.shape[0], pages=str(list(pages.shape)),
        )  # fmt: skip
    _written("pages", pages, staging=staging)


def move_values(ids: Tensor, pages: int) -> None:
    if ids.numel() == 0:
        return
    low, high = (int(end) for end in torch.aminmax(ids))
    if low < -1 or high >= pages:
        raise BadRequest("a page id is not in the pool", page=low if low < -1 else high, pages=pages)


def copy_shapes(pages: Tensor, rows: Tensor) -> None:
    _any_view(pages)
    _integers("rows", rows, 2, torch.int32, pages)
    if rows.shape[1] != 3:
        raise BadRequest("rows are [N, 3]: source page, target page, rows", columns=rows.shape[1])
    _written("pages", pages)


def _any_view(pages: Pages) -> None:
    if not isinstance(pages, Tensor):
        raise BadRequest("quantized pages are moved as the bytes they are: give the arena_view, or a part of it")
    if not 4 <= pages.dim() <= 6:
        raise BadRequest("pages are [pages, ..., page_size, kv_heads, head_dim] of 4 to 6 dimensions", dims=pages.dim())
    _movable("pages", pages, (4, 5, 6), pages)
    if min(pages.shape) < 1:
        raise BadRequest("pages have an empty dimension", shape=str(list(pages.shape)))


def copy_values(rows: Tensor, pages: int, page_size: int) -> None:
    if rows.numel() == 0:
        return
    lows, highs = torch.aminmax(rows, dim=0)
    low, high = lows.tolist(), highs.tolist()
    for column, bound in ((0, pages - 1), (1, pages - 1), (2, page_size)):
        if low[column] < 0 or high[column] > bound:
            name = ("source page", "target page", "row count")[column]
            bad = low[column] if low[column] < 0 else high[column]
            raise BadRequest(f"a {name} of copy_rows is out of range", value=bad, most=bound)


def _pages(k_pages: Pages, v_pages: Pages) -> None:
    if isinstance(k_pages, QuantizedPages) and isinstance(v_pages, QuantizedPages):
        _quantized("k_pages", k_pages)
        _quantized("v_pages", v_pages)
    elif isinstance(k_pages, Tensor) and isinstance(v_pages, Tensor):
        _tensor("k_pages", k_pages, (4,), k_pages)
        _tensor("v_pages", v_pages, (4,), k_pages)
    else:
        raise BadRequest("of k_pages and v_pages one is quantized")
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype or min(k_pages.shape) < 1:
        raise BadRequest(
            "k_pages and v_pages are not one shape [pages, page_size, kv_heads, head_dim] of one dtype",
            k_pages=f"{list(k_pages.shape)} {k_pages.dtype}", v_pages=f"{list(v_pages.shape)} {v_pages.dtype}",
        )  # fmt: skip


def _quantized(name: str, pages: QuantizedPages) -> None:
    codes, scales = pages.codes, pages.scales
    if codes.dtype not in SCALES:
        raise BadRequest(f"{name} has codes of dtype {codes.dtype}; allowed: {', '.join(map(str, SCALES))}")
    if codes.dim() != 4:
        raise BadRequest(f"{name} has codes of the wrong number of dimensions", dims=codes.dim(), need=4)
    groups = QUANTIZED[pages.dtype].scales(pages.shape[3])
    need = [*codes.shape[:3], groups] if groups else []
    got = [] if scales is None else list(scales.shape)
    if got != need:
        raise BadRequest(f"the scales of {name} are not those of its codes", shape=str(got), need=str(need))
    if scales is not None:
        if scales.dtype != SCALES[codes.dtype]:
            raise BadRequest(f"{name} has scales of dtype {scales.dtype}; allowed: {SCALES[codes.dtype]}")
        _same_device(f"{name}'s scales", scales, codes)


def _tensor(name: str, tensor: Pages, dims: tuple[int, ...], like: Pages) -> None:
    """``like``: the pages. Beside quantized ones a tensor may have any dtype that pages could have had."""
    if not isinstance(tensor, Tensor):
        raise BadRequest(f"{name} is not a tensor; quantized pages are not meant here")
    _dimensions(name, tensor, dims)
    if tensor.dtype not in DTYPES.values():
        raise BadRequest(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(DTYPES)}")
    if isinstance(like, Tensor) and tensor.dtype != like.dtype:
        raise BadRequest(f"{name} and the pages differ in dtype", got=str(tensor.dtype), pages=str(like.dtype))
    _same_device(name, tensor, like)


def _movable(name: str, tensor: Tensor, dims: tuple[int, ...], pages: Tensor) -> None:
    """What is moved as it is may also be bytes: the rows of quantized pages, as ``arena_view`` gives them."""
    if tensor.dtype == pages.dtype == torch.uint8:
        _dimensions(name, tensor, dims)
        _same_device(name, tensor, pages)
    else:
        _tensor(name, tensor, dims, pages)


def _dimensions(name: str, tensor: Tensor, dims: tuple[int, ...]) -> None:
    if tensor.dim() not in dims:
        need = " or ".join(map(str, dims))
        raise BadRequest(f"{name} has the wrong number of dimensions", dims=tensor.dim(), need=need)


def _integers(name: str, tensor: Tensor, dims: int, dtype: torch.dtype, like: Pages) -> None:
    if tensor.dim() != dims or tensor.dtype != dtype:
        raise BadRequest(
            f"{name} is not a {dims}-dimensional {dtype} tensor", dims=tensor.dim(), dtype=str(tensor.dtype)
        )
    _same_device(name, tensor, like)


def _same_device(name: str, tensor: Tensor, like: Pages) -> None:
    if tensor.device != like.device:
        raise BadRequest(
            f"{name} and the pages are on different devices", got=str(tensor.device), pages=str(like.device)
        )


def _parts(pages: Pages) -> list[Tensor]:
    parts = [pages.codes, pages.scales] if isinstance(pages, QuantizedPages) else [pages]
    return [part for part in parts if part is not None]


def _written(name: str, tensor: Tensor, **sources: Tensor) -> None:
    """What is written has a place of its own for each element, apart from what is written into it or read beside it."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise BadRequest(f"elements of {name} lie in one place: it was expanded", strides=str(tensor.stride()))
    for source_name, source in sources.items():
        if source.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            continue
        (begin, end), (source_begin, source_end) = _reach(tensor), _reach(source)
        if begin < source_end and source_begin < end:
            raise BadRequest(f"{source_name} lies in the memory of {name}: give a clone")


def _reach(tensor: Tensor) -> tuple[int, int]:
    """From the first byte to behind the last one."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize
