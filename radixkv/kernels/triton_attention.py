"""Attention over a page table in Triton: ``plan`` cuts the work, ``attend`` does it, ``merge`` joins what was cut.

A *span* is a run of tokens that the same rows attend to: of a plain batch each row is one span, in a batch with shared
prefixes (``prefixes``) also each prefix, which is then read once for all its rows. A span's query rows, the query
tokens of its rows times the query heads that share a KV head, are cut into *blocks* of BLOCK_M (mostly there is one),
its tokens into *slices*. One program of ``attend`` takes one block of one slice for one KV head (an *item*), walks the
slice in tiles of BLOCK_N tokens with the running softmax of FlashAttention, and leaves its normalised output and the
logarithm of its sum of exponentials; ``merge`` weighs these *parts* by it. A row in one part is written at once.

``plan`` gives every span slices in proportion to its work, so that a long row among short ones keeps the device busy
(the idea of stream-K and FlashDecoding). It reads the lengths on the device: nothing waits, launches depend on shapes
alone and can be captured in a CUDA graph. A span's slices depend on its length and the total work, not on its place.

What keeps garbage out: tokens at or behind the row's length are neither loaded nor scored (a masked score alone would
not do: 0 * NaN is NaN in the value product), page-table entries behind them are not followed. What cannot be checked
without waiting for the device is made loud and harmless: a page id outside the pool or a length beyond the page table
is never dereferenced and makes the row NaN.

Interpreter (TRITON_INTERPRET=1): bfloat16 arithmetic is silently wrong there, hence WIDEN; ``and``/``or`` on blocks
are too, hence ``&``.
"""

# Device functions have no Python types, as many arguments as the hardware needs numbers, and constants in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from radixkv.kernels.triton_quantized import PLAIN, load_quantized

LOG2_E = tl.constexpr(1.4426950408889634)
TREE_BITS = tl.constexpr(8)
PLAN_CHUNK = 256

# Rows of the span table, [4, spans + 1]: the page-table row to read ids from, first token, end (-1: the row's length),
# where its members begin. Rows of the slot table, [3, spans + 1]: first item, slices, first part.
SPAN_ROW, SPAN_BEGIN, SPAN_END, SPAN_MEMBERS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SLOT_ITEM, SLOT_SLICES, SLOT_PART = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def span_of(
    index, ok, lengths, starts, span_table, columns, rows, capacity, window,
    PER_ROW: tl.constexpr, SHARED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """(page-table row, its length, first token, end, query tokens) of one span, or of a block of them."""
    row = index
    if SHARED:
        row = tl.load(span_table + SPAN_ROW * columns + index, mask=ok, other=0)
    # One token beyond the table is enough to make the row NaN; what a wrong length says further is not believed.
    length = tl.maximum(tl.minimum(tl.load(lengths + row, mask=ok, other=0), capacity + 1), 0)
    if PER_ROW == 0:
        queries = tl.load(starts + index + 1, mask=ok, other=0) - tl.load(starts + index, mask=ok, other=0)
        queries = tl.minimum(tl.maximum(queries, 0), rows)
    else:
        queries = length * 0 + PER_ROW
    begin = length * 0
    if WINDOWED:
        begin = tl.maximum(length - queries + 1 - window, 0)
    end = length
    if SHARED:
        fixed = tl.load(span_table + SPAN_END * columns + index, mask=ok, other=0)
        end = tl.where(fixed < 0, length, fixed)
        first = tl.load(span_table + SPAN_BEGIN * columns + index, mask=ok, other=0)
        begin = tl.where(fixed < 0, tl.maximum(begin, first), first)
        member = span_table + SPAN_MEMBERS * columns + index
        queries *= tl.load(member + 1, mask=ok, other=0) - tl.load(member, mask=ok, other=0)
    return row, length, begin, end, queries


@triton.jit(do_not_specialize=["spans", "columns", "rows", "capacity", "window", "target", "part_base"])
def plan(
    lengths, starts, span_table, slots, spans, columns, rows, capacity, window, target, part_base,
    PER_ROW: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAST_TILES: tl.constexpr, SHARED: tl.constexpr, WINDOWED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Fills the slot table. Slices are such that the batch has about ``target`` items more than it has blocks.

    One program: it adds up the work of all spans, then gives each its share. Parts are counted in query tokens.
    """
    work = tl.zeros([CHUNK], tl.int64)
    for first in range(0, spans, CHUNK):
        index = first + tl.arange(0, CHUNK)
        _, _, begin, end, queries = span_of(
            index,
            index < spans,
            lengths,
            starts,
            span_table,
            columns,
            rows,
            capacity,
            window,
            PER_ROW,
            SHARED,
            WINDOWED,
        )
        tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)
        work += tiles.to(tl.int64) * tl.cdiv(queries * GROUP, BLOCK_M)
    total = tl.sum(work, 0)
    # No target: each span in one slice. The sum of blocks * (slices - 1) is at most the target.
    share = tl.maximum(tl.where(target > 0, tl.cdiv(total, tl.maximum(target, 1)), total + 1), LEAST_TILES)
    item = target * 0
    part = item + part_base
    for first in range(0, spans, CHUNK):
        index = first + tl.arange(0, CHUNK)
        ok = index < spans
        _, _, begin, end, queries = span_of(
            index, ok, lengths, starts, span_table, columns, rows, capacity, window, PER_ROW, SHARED, WINDOWED
        )
        queries = tl.where(ok, queries, 0)
        tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N).to(tl.int64)
        slices = tl.maximum(tl.cdiv(tiles, share), 1).to(tl.int32)
        items = slices * tl.cdiv(queries * GROUP, BLOCK_M)
        parts = slices * queries
        if not SHARED:
            parts = tl.where(slices > 1, parts, 0)
        tl.store(slots + SLOT_ITEM * columns + index, item + tl.cumsum(items, 0) - items, mask=ok)
        tl.store(slots + SLOT_SLICES * columns + index, slices, mask=ok)
        tl.store(slots + SLOT_PART * columns + index, part + tl.cumsum(parts, 0) - parts, mask=ok)
        item += tl.sum(items, 0)
        part += tl.sum(parts, 0)
    tl.store(slots + SLOT_ITEM * columns + spans, item)


@triton.jit
def find(ascending, count, value):
    """The last i below ``count`` with ascending[i] <= value; ascending[0] is not above it."""
    low = count * 0
    high = low + count
    while high - low > 1:
        middle = (low + high) // 2
        below = tl.load(ascending + middle) <= value
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def seen_drafts(bits):
    """How many draft tokens these bits name, at least the token itself."""
    count = tl.zeros_like(bits)
    for place in tl.static_range(TREE_BITS):
        count += (bits >> place) & 1
    return tl.maximum(count, 1)


@triton.jit
def with_sink(log_sum, sink):
    """(the logarithm of the sum with the sink in it, the share that the values keep). A row of nothing stays so."""
    none = log_sum == float("-inf")
    top = tl.where(none, 0.0, tl.maximum(log_sum, sink))
    total = tl.exp(log_sum - top) + tl.exp(sink - top)
    joined = tl.where(none, log_sum, top + tl.log(total))
    return joined, tl.exp(log_sum - tl.where(none, 0.0, joined))


@triton.jit
def load_tile(
    pages, scales, page, page_ok, in_page, dim, page_stride, token_stride, scale_page, scale_token,
    HEAD_DIM: tl.constexpr, DTYPE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """One head's keys or values of a tile's tokens; what leads to a page is computed in 64 bits."""
    at = page.to(tl.int64) * page_stride + in_page * token_stride
    if FORMAT == PLAIN:
        ok = page_ok[:, None] & (dim < HEAD_DIM)[None, :]
        tile = tl.load(pages + at[:, None] + dim[None, :], mask=ok, other=0.0)
    else:
        scale_at = at
        if scales is not None:
            scale_at = page.to(tl.int64) * scale_page + in_page * scale_token
        tile = load_quantized(pages, scales, at, scale_at, page_ok, FORMAT, HEAD_DIM, dim.shape[0])
    return tile.to(DTYPE)


@triton.jit
def head_scales(scales, head, head_stride):
    """Where a head's scales begin, or None."""
    if scales is not None:
        scales += head * head_stride
    return scales


@triton.jit
def capped(score, scale, softcap, CAPPED: tl.constexpr):
    """Scores scaled and capped, times log2(e): exponentials are powers of 2 from here on."""
    if CAPPED:
        ratio = score * (scale / softcap)
        # tanh(x) = 1 - 2 / (1 + exp(2 x)) is right at both ends; near 0 its digits cancel, there the series has them.
        twice = tl.exp2(tl.minimum(ratio * (2.0 * LOG2_E), 126.0))
        square = ratio * ratio
        series = ratio * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
        score = tl.where(square < 0.0625, series, 1.0 - 2.0 / (1.0 + twice)) * (softcap * LOG2_E)
    else:
        score = score * (scale * LOG2_E)
    return score


@triton.jit
def place_drafts(token, tree, drafts_from, PER_ROW: tl.constexpr):
    """Positions of the tokens of a row whose draft tokens stand where its tree says."""
    draft = token - drafts_from
    is_draft = (draft >= 0) & (draft < PER_ROW)
    bits = tl.load(tree + draft, mask=is_draft, other=0)
    return tl.where(is_draft, drafts_from + seen_drafts(bits) - 1, token)


@triton.jit(do_not_specialize=["pages", "table_width", "spans", "columns", "rows", "part_limit", "window"])
def attend(
    q, k_pages, v_pages, k_scales, v_scales, page_table, lengths, starts, span_table, members, slots,
    tree, sinks, slopes, out, lse, parts, parts_lse, scale, softcap, window,
    q_row, q_head, k_page, k_token, k_head, v_page, v_token, v_head,
    ks_page, ks_token, ks_head, vs_page, vs_token, vs_head,
    pages, table_width, spans, columns, rows, part_limit,
    PER_ROW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, WIDEN: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """out [rows, Hq, HEAD_DIM] and lse [rows, Hq], or parts of both, of a grid of items * KV_HEADS programs."""
    item = tl.program_id(0) // KV_HEADS
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    if item >= tl.load(slots + SLOT_ITEM * columns + spans):
        return
    span = find(slots + SLOT_ITEM * columns, spans, item)
    capacity = table_width * PAGE_SIZE
    row, length, begin, end, queries = span_of(
        span, span < spans, lengths, starts, span_table, columns, rows, capacity, window, PER_ROW, SHARED, WINDOWED
    )
    slices = tl.load(slots + SLOT_SLICES * columns + span)
    blocks = tl.cdiv(queries * GROUP, BLOCK_M)
    within = item - tl.load(slots + SLOT_ITEM * columns + span)
    piece = within // blocks
    block = within % blocks

    # The block's query rows: query tokens of the span's rows, each with the query heads of this KV head.
    query_row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    query_ok = query_row < queries * GROUP
    of_span = query_row // GROUP
    head = kv_head * GROUP + query_row % GROUP
    if SHARED:
        member = tl.load(span_table + SPAN_MEMBERS * columns + span) + of_span // PER_ROW
        query_of = tl.load(members + member, mask=query_ok, other=0)
        own_length = tl.maximum(tl.minimum(tl.load(lengths + query_of, mask=query_ok, other=0), capacity + 1), 0)
        drafts_from = own_length - PER_ROW
        in_row = of_span % PER_ROW
        token_row = query_of * PER_ROW + in_row
    else:
        in_row = of_span
        drafts_from = length - queries
        if PER_ROW == 0:
            token_row = tl.load(starts + span) + in_row
            query_ok = query_ok & (token_row >= 0) & (token_row < rows)
        else:
            token_row = span * PER_ROW + in_row
    position = drafts_from + in_row
    if tree is not None:
        bits = tl.load(tree + token_row, mask=query_ok, other=0)
        position = drafts_from + seen_drafts(bits) - 1
    dim = tl.arange(0, BLOCK_D)
    tile_q = query_ok[:, None] & (dim < HEAD_DIM)[None, :]
    q_at = token_row.to(tl.int64) * q_row + head * q_head
    query = tl.load(q + q_at[:, None] + dim[None, :], mask=tile_q, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    rope_dim = tl.arange(0, BLOCK_R)
    query_rope = query
    if ROPE_DIM > 0:
        rope_ok = query_ok[:, None] & (rope_dim < ROPE_DIM)[None, :]
        query_rope = tl.load(q + HEAD_DIM + q_at[:, None] + rope_dim[None, :], mask=rope_ok, other=0.0)
        if WIDEN:
            query_rope = query_rope.to(tl.float32)
    if slopes is not None:
        slope = tl.load(slopes + head, mask=query_ok, other=0.0) * LOG2_E

    slice_tokens = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), slices) * BLOCK_N
    low = begin + piece * slice_tokens
    high = tl.minimum(low + slice_tokens, end)
    if CAUSAL and not SHARED and tree is None:
        # No query of this block sees a token behind its last query, nor one before its first one's window.
        last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, queries - 1)
        high = tl.minimum(high, drafts_from + last + 1)
        if WINDOWED:
            low = tl.maximum(low, drafts_from + (block * BLOCK_M) // GROUP - window + 1)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = page_table + row.to(tl.int64) * table_width
    for start in range(low, high, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        token_ok = token < high
        page = tl.load(table + token // PAGE_SIZE, mask=token_ok & (token < capacity), other=-1)
        page_ok = (page >= 0) & (page < pages)
        in_page = token % PAGE_SIZE
        key = load_tile(
            k_pages + kv_head * k_head, head_scales(k_scales, kv_head, ks_head), page, page_ok, in_page, dim,
            k_page, k_token, ks_page, ks_token, HEAD_DIM, query.dtype, FORMAT,
        )  # fmt: skip
        if ROPE_DIM > 0:  # latent pages: the key's first part is the value, its second lies behind it
            value = key
            rope_at = k_pages + kv_head * k_head + HEAD_DIM
            key_rope = load_tile(
                rope_at, None, page, page_ok, in_page, rope_dim,
                k_page, k_token, None, None, ROPE_DIM, query.dtype, FORMAT,
            )  # fmt: skip
            score = tl.dot(query_rope, tl.trans(key_rope), input_precision="ieee")
            score = tl.dot(query, tl.trans(key), score, input_precision="ieee")
        else:
            value = load_tile(
                v_pages + kv_head * v_head, head_scales(v_scales, kv_head, vs_head), page, page_ok, in_page, dim,
                v_page, v_token, vs_page, vs_token, HEAD_DIM, query.dtype, FORMAT,
            )  # fmt: skip
            score = tl.dot(query, tl.trans(key), input_precision="ieee")
        score = capped(score, scale, softcap, CAPPED)
        key_position = token
        if (slopes is not None or WINDOWED) and tree is not None:
            key_position = place_drafts(token, tree + row * PER_ROW, length - PER_ROW, PER_ROW)
        if slopes is not None:
            score += slope[:, None] * (key_position[None, :] - position[:, None]).to(tl.float32)
        score = tl.where(page_ok[None, :], score, float("nan"))
        seen = token_ok[None, :]
        if CAUSAL:
            if tree is not None:
                behind = token[None, :] - drafts_from[:, None] if SHARED else (token - drafts_from)[None, :]
                seen = seen & ((behind < 0) | (((bits[:, None] >> tl.minimum(tl.maximum(behind, 0), 31)) & 1) != 0))
            else:
                seen = seen & (token[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (position[:, None] - key_position[None, :] < window)
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen so far: all weights 0, not NaN
        weight = tl.exp2(score - level[:, None])
        shrink = tl.exp2(top - level)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = new_top

    # No token at all: zeros, and a weight of nothing (lse -inf) in the merge.
    none = total == 0.0
    divisor = tl.where(none, 1.0, total)
    log_sum = tl.where(none, float("-inf"), (top + tl.log2(divisor)) / LOG2_E)
    result = acc / divisor[:, None]
    if SHARED or slices > 1:
        part = tl.load(slots + SLOT_PART * columns + span) + piece * queries + of_span
        query_ok = query_ok & (part >= 0) & (part < part_limit)  # always, but for starts that are wrong
        tile_q = query_ok[:, None] & (dim < HEAD_DIM)[None, :]
        place = part.to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(parts_lse + place, log_sum, mask=query_ok)
        tl.store(parts + place[:, None] * HEAD_DIM + dim[None, :], result, mask=tile_q)
    else:
        if sinks is not None:
            log_sum, share = with_sink(log_sum, tl.load(sinks + head, mask=query_ok, other=0.0))
            result = result * share[:, None]
        place = token_row.to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(lse + place, log_sum, mask=query_ok)
        tl.store(out + place[:, None] * HEAD_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=tile_q)


@triton.jit(do_not_specialize=["columns", "batch", "part_limit"])
def merge(
    parts, parts_lse, starts, span_table, slots, chain_starts, chain_spans, chain_members, sinks, out, lse,
    columns, batch, part_limit,
    PER_ROW: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, CHUNK: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Join the parts of one query token and up to BLOCK_H heads. Grid (query tokens, blocks of heads)."""
    token_row = tl.program_id(0)
    if PER_ROW == 0:
        row = find(starts, batch, token_row)
        in_row = token_row - tl.load(starts + row)
        queries = tl.load(starts + row + 1) - tl.load(starts + row)
    else:
        row = token_row // PER_ROW
        in_row = token_row % PER_ROW
        queries = PER_ROW
    entry, entries = row, row + 1
    if SHARED:
        entry, entries = tl.load(chain_starts + row), tl.load(chain_starts + row + 1)
    elif (in_row < 0) | (in_row >= queries) | (tl.load(slots + SLOT_SLICES * columns + row) < 2):
        return  # written already, or a query token of no row
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = head < HEADS
    dim = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for link in range(entry, entries):
        span = link
        first = in_row
        apart = queries
        if SHARED:
            span = tl.load(chain_spans + link)
            first = tl.load(chain_members + link) * PER_ROW + in_row
            member = span_table + SPAN_MEMBERS * columns + span
            apart = (tl.load(member + 1) - tl.load(member)) * PER_ROW
        first += tl.load(slots + SLOT_PART * columns + span)
        slices = tl.load(slots + SLOT_SLICES * columns + span)
        for begin in range(0, slices, CHUNK):
            piece = begin + tl.arange(0, CHUNK)
            part = first + piece * apart
            ok = ((piece < slices) & (part >= 0) & (part < part_limit))[:, None] & head_ok[None, :]
            place = part.to(tl.int64)[:, None] * HEADS + head[None, :]
            logs = tl.load(parts_lse + place, mask=ok, other=float("-inf"))
            tile_ok = ok[:, :, None] & (dim < HEAD_DIM)[None, None, :]
            tile = tl.load(parts + place[:, :, None] * HEAD_DIM + dim[None, None, :], mask=tile_ok, other=0.0)
            new_top = tl.maximum(top, tl.max(logs, 0))
            level = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp(logs - level[None, :])
            shrink = tl.exp(top - level)
            total = total * shrink + tl.sum(weight, 0)
            acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * tile, 0)
            top = new_top
    none = total == 0.0
    divisor = tl.where(none, 1.0, total)
    log_sum = tl.where(none, float("-inf"), top + tl.log(divisor))
    result = acc / divisor[:, None]
    if sinks is not None:
        log_sum, share = with_sink(log_sum, tl.load(sinks + head, mask=head_ok, other=0.0))
        result = result * share[:, None]
    place = token_row.to(tl.int64) * HEADS + head
    tl.store(lse + place, log_sum, mask=head_ok)
    tile_out = head_ok[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out + place[:, None] * HEAD_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=tile_out)
