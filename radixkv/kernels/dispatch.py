"""The public kernels: check the arguments, choose an implementation.

``impl``: "auto" is Triton for CUDA tensors and torch otherwise; "torch" is the reference, on any device; "triton" needs
CUDA tensors (or Triton's interpreter, for tests). Every refusal is a BadRequest that names the argument.

``check_values`` reads lengths, page ids and slots before a Triton kernel is launched on a CUDA device, and so waits for
it. Everywhere else they are always read and checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from radixkv.errors import BadRequest
from radixkv.kernels import arguments, checks, reference_attention, reference_write
from radixkv.kernels.layout import LayerPages
from radixkv.kernels.options import Attention, Batch, Options, Rotary, tree_bits
from radixkv.kernels.prefixes import SharedPrefixes
from radixkv.kernels.quantized import Pages, QuantizedPages

if TYPE_CHECKING:
    from typing import Unpack

Impl = Literal["auto", "triton", "torch"]


@overload
def decode_attention(
    q: Tensor, k_pages: Pages, v_pages: Pages, page_table: Tensor, lengths: Tensor, *,
    return_lse: Literal[False] = False, tree_mask: Tensor | None = None, prefixes: SharedPrefixes | None = None,
    impl: Impl = "auto", check_values: bool = False, **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def decode_attention(
    q: Tensor, k_pages: Pages, v_pages: Pages, page_table: Tensor, lengths: Tensor, *,
    return_lse: Literal[True], tree_mask: Tensor | None = None, prefixes: SharedPrefixes | None = None,
    impl: Impl = "auto", check_values: bool = False, **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def decode_attention(
    q: Tensor, k_pages: Pages, v_pages: Pages, page_table: Tensor, lengths: Tensor, *,
    return_lse: bool = False, tree_mask: Tensor | None = None, prefixes: SharedPrefixes | None = None,
    impl: Impl = "auto", check_values: bool = False, **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of each row's last tokens over the row's ``lengths[b]`` tokens, themselves among them.

    q [B, Hq, D], one query token a row, or [B, T, Hq, D] with T of 1 to 8: the row's last T tokens, each seeing those
    before it and itself; a row with fewer has its own at the end, and what stands before the first token sees nothing.
    k_pages, v_pages [P, S, Hkv, D], any strides, or both ``QuantizedPages``, which are read as they are and multiplied
    in q's dtype; Hq a multiple of Hkv (query head h reads KV head h // (Hq // Hkv));
    page_table [B, M] int32, entry i of a row holds tokens [i * S, (i + 1) * S), entries behind the length may be
    anything (-1 by custom); lengths [B] int32, 0 is legal. Options: see ``Options``.

    tree_mask: bool [B, T, T], or [T, T] for all rows alike: query t sees the row's draft token u where [b, t, u] is
    set, and all tokens before the T. With it a draft token's position (for window and slopes) is that of the first
    plus the number of draft tokens it sees, less itself. prefixes: of ``group_prefixes``, for these rows; each shared
    page is then read once for its rows.

    Returns out, shaped and typed like q, with return_lse also lse, q's shape without D, float32: the natural logarithm
    of the sum of exponentials of the scores, a sink's too. A query that sees nothing gives zeros and -inf. Nothing but
    the first ``lengths[b]`` tokens has any effect, be it NaN. Where values are not checked, a length beyond the table
    or a page id out of the pool gives NaN and a negative length counts as 0; memory outside the pool is never touched.
    """
    arguments.tensors(q=q, page_table=page_table, lengths=lengths)
    arguments.pages(k_pages=k_pages, v_pages=v_pages)
    checks.decode_shapes(q, k_pages, v_pages, page_table, lengths)
    attention = _options(q, k_pages, options, tree_mask)
    layer = LayerPages(k_pages, v_pages)
    out, lse = _decode(q, layer, page_table, lengths, (attention, prefixes, impl, check_values))
    return (out, lse) if return_lse else out


@overload
def mla_decode_attention(
    q: Tensor, pages: Tensor, page_table: Tensor, lengths: Tensor, *, latent_dim: int, scale: float,
    return_lse: Literal[False] = False, tree_mask: Tensor | None = None, prefixes: SharedPrefixes | None = None,
    impl: Impl = "auto", check_values: bool = False,
) -> Tensor: ...  # fmt: skip
@overload
def mla_decode_attention(
    q: Tensor, pages: Tensor, page_table: Tensor, lengths: Tensor, *, latent_dim: int, scale: float,
    return_lse: Literal[True], tree_mask: Tensor | None = None, prefixes: SharedPrefixes | None = None,
    impl: Impl = "auto", check_values: bool = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def mla_decode_attention(
    q: Tensor, pages: Tensor, page_table: Tensor, lengths: Tensor, *, latent_dim: int, scale: float,
    return_lse: bool = False, tree_mask: Tensor | None = None, prefixes: SharedPrefixes | None = None,
    impl: Impl = "auto", check_values: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Multi-head latent attention of each row's last tokens, in the absorbed form (DeepSeek-V2).

    pages [P, S, C + R]: a token's latent of C = ``latent_dim`` dims and behind it its rotated key of R, one for all
    heads. q [B, Hq, C + R], or [B, T, Hq, C + R]: each head's query times its key up-projection, and its rotated part.
    out has C dims instead of C + R: the weighted latents, still to be multiplied by each head's value up-projection.
    scale has no default: it is that of the head dim before absorption. The rest is as in ``decode_attention``.
    """
    arguments.tensors(q=q, page_table=page_table, lengths=lengths)
    arguments.pages(pages=pages)
    latent_dim, scale = arguments.whole("latent_dim", latent_dim), arguments.real("scale", scale)
    checks.latent_shapes(pages, latent_dim)
    keys = pages[:, :, None, :]
    checks.decode_shapes(q, keys, keys, page_table, lengths)
    attention = _options(q, keys, {"scale": scale}, tree_mask)
    layer = LayerPages(keys, keys[..., :latent_dim])
    out, lse = _decode(q, layer, page_table, lengths, (attention, prefixes, impl, check_values))
    return (out, lse) if return_lse else out


@overload
def prefill_attention(
    q: Tensor, k_pages: Pages, v_pages: Pages, page_table: Tensor, lengths: Tensor, starts: Tensor, *,
    return_lse: Literal[False] = False, impl: Impl = "auto", check_values: bool = False, **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def prefill_attention(
    q: Tensor, k_pages: Pages, v_pages: Pages, page_table: Tensor, lengths: Tensor, starts: Tensor, *,
    return_lse: Literal[True], impl: Impl = "auto", check_values: bool = False, **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def prefill_attention(
    q: Tensor, k_pages: Pages, v_pages: Pages, page_table: Tensor, lengths: Tensor, starts: Tensor, *,
    return_lse: bool = False, impl: Impl = "auto", check_values: bool = False, **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of any number of new tokens a row over the row's cached tokens and the new ones before them.

    q [N, Hq, D]: row b's new tokens are q[starts[b]:starts[b + 1]], the last of its ``lengths[b]`` tokens, and their
    keys and values are in its pages already (``append``). starts [B + 1] int32 ascends from 0 and ends at N or before:
    what is behind it belongs to no row and gives zeros and -inf. A row may have one new token (a decode) or none. The
    rest is as in ``decode_attention``.
    """
    arguments.tensors(q=q, page_table=page_table, lengths=lengths, starts=starts)
    arguments.pages(k_pages=k_pages, v_pages=v_pages)
    checks.prefill_shapes(q, k_pages, v_pages, page_table, lengths, starts)
    attention = _options(q, k_pages, options, None)
    use_triton = _choose(impl, k_pages)
    if check_values or not (use_triton and k_pages.is_cuda):
        checks.prefill_values(starts, lengths, len(q))
        checks.decode_values(page_table, lengths, k_pages.shape, (starts.diff(), attention.window))
    batch = Batch(q, LayerPages(k_pages, v_pages), page_table, lengths, 0, starts)
    out, lse = _attention(batch, attention, None, use_triton)
    return (out, lse) if return_lse else out


@overload
def append(
    k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, slots: Tensor, *,
    rotary: Rotary | None = None, q: None = None, impl: Impl = "auto", check_values: bool = False,
) -> None: ...  # fmt: skip
@overload
def append(
    k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, slots: Tensor, *,
    rotary: Rotary, q: Tensor, impl: Impl = "auto", check_values: bool = False,
) -> Tensor: ...  # fmt: skip
def append(
    k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, slots: Tensor, *,
    rotary: Rotary | None = None, q: Tensor | None = None, impl: Impl = "auto", check_values: bool = False,
) -> Tensor | None:  # fmt: skip
    """Write the keys and values of T tokens into their slots.

    k, v [T, Hkv, D]; slots [T] int64, slot = page * page_size + row, -1 skips the token. Slots other than -1 differ;
    which token wins where they do not is not defined. Into ``QuantizedPages`` they are quantized, keys after they were
    turned and rounded to their dtype. rotary: keys are turned on their way (see ``Rotary``); with it
    q [T, Hq, D] may be given and comes back turned, from the same launch. Where values are not checked, a slot out of
    the pool is skipped, and a position without angles makes NaN of what it would have turned.
    """
    arguments.tensors(k=k, v=v, slots=slots)
    arguments.pages(k_pages=k_pages, v_pages=v_pages)
    arguments.optional(q=q)
    checks.append_shapes(k, v, k_pages, v_pages, slots)
    if rotary is not None:
        checks.rotary_fits(rotary, k, k_pages)
    if q is not None:
        checks.query_fits(q, k, rotary)
    use_triton = _choose(impl, k_pages)
    if check_values or not (use_triton and k_pages.is_cuda):
        checks.append_values(slots, k_pages.shape[0], k_pages.shape[1])
        if rotary is not None:
            checks.rotary_values(rotary)
    pages = LayerPages(k_pages, v_pages)
    if use_triton:
        from radixkv.kernels import triton_quantized, triton_write

        if isinstance(k_pages, QuantizedPages):
            return triton_quantized.append(k, v, pages, slots, rotary, q)
        return triton_write.append(k, v, pages, slots, rotary, q)
    return reference_write.append(k, v, pages, slots, rotary, q)


def copy_rows(pages: Tensor, rows: Tensor, *, impl: Impl = "auto", check_values: bool = False) -> None:
    """For each (source page, target page, n) of ``rows`` [N, 3] int32: the first n token rows of source into target.

    ``pages`` is any view [pages, ..., page_size, kv_heads, head_dim] with up to two dimensions in the middle, all of
    which are copied: one layer's keys or values [P, S, H, D], one layer's both [P, 2, S, H, D], or the whole arena
    [P, layers, 2, S, H, D] (``arena_view``, of quantized pages too), which is what copy_rows of a reply means. The
    entries are carried out as
    if one after the other, so a source may be an earlier entry's target. Where values are not checked, an entry that
    is out of range is skipped.
    """
    arguments.tensors(rows=rows)
    arguments.pages(pages=pages)
    checks.copy_shapes(pages, rows)
    use_triton = _choose(impl, pages)
    if check_values or not (use_triton and pages.is_cuda):
        checks.copy_values(rows, pages.shape[0], pages.shape[-3])
    if use_triton:
        from radixkv.kernels import triton_write

        triton_write.copy_rows(pages, rows)
    else:
        reference_write.copy_rows(pages, rows)


def gather_pages(
    pages: Tensor, ids: Tensor, staging: Tensor, *, impl: Impl = "auto", check_values: bool = False
) -> None:  # fmt: skip
    """Copy page ``ids[i]`` to ``staging[i]``, all in one launch; -1 leaves its place as it is.

    ``pages`` is a view as in ``copy_rows``, of the whole arena or of a part of each page; ``ids`` [N] int32;
    ``staging`` contiguous, [N] and the view's other dimensions, same dtype and device. Where values are not checked,
    an id out of the pool is skipped.
    """
    if _move(pages, ids, staging, impl, check_values):
        from radixkv.kernels import triton_write

        triton_write.gather_pages(pages, ids, staging)
    else:
        reference_write.gather_pages(pages, ids, staging)


def scatter_pages(
    staging: Tensor, pages: Tensor, ids: Tensor, *, impl: Impl = "auto", check_values: bool = False
) -> None:  # fmt: skip
    """The way back: ``staging[i]`` to page ``ids[i]``. Ids other than -1 differ; the rest as in ``gather_pages``."""
    if _move(pages, ids, staging, impl, check_values):
        from radixkv.kernels import triton_write

        triton_write.scatter_pages(staging, pages, ids)
    else:
        reference_write.scatter_pages(staging, pages, ids)


def _move(pages: Tensor, ids: Tensor, staging: Tensor, impl: Impl, check_values: bool) -> bool:
    arguments.tensors(ids=ids, staging=staging)
    arguments.pages(pages=pages)
    checks.move_shapes(pages, ids, staging)
    use_triton = _choose(impl, pages)
    if check_values or not (use_triton and pages.is_cuda):
        checks.move_values(ids, pages.shape[0])
    return use_triton


def _decode(
    q: Tensor, pages: LayerPages, page_table: Tensor, lengths: Tensor,
    how: tuple[Attention, SharedPrefixes | None, Impl, bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of q [B, Hq, D] or [B, T, Hq, D], whose shapes fit. ``how``: options, prefixes, impl, check_values."""
    attention, prefixes, impl, check_values = how
    per_row = 1 if q.dim() == 3 else q.shape[1]
    if prefixes is not None:
        checks.prefixes_fit(prefixes, page_table, pages.keys.shape[1], per_row, attention)
        if prefixes.shared_spans == 0:  # each row by itself, which needs no merge
            prefixes = None
    use_triton = _choose(impl, pages.keys)
    if check_values or not (use_triton and q.is_cuda):
        checks.decode_values(page_table, lengths, pages.keys.shape, (per_row, attention.window))
        if prefixes is not None:
            checks.prefix_values(prefixes, page_table, lengths, pages.keys.shape)
    flat = q if q.dim() == 3 else q.flatten(0, 1)
    batch = Batch(flat, pages, page_table, lengths, per_row)
    out, lse = _attention(batch, attention, prefixes, use_triton)
    return out.view(*q.shape[:-1], out.shape[-1]), lse.view(q.shape[:-1])


def _attention(
    batch: Batch, options: Attention, prefixes: SharedPrefixes | None, use_triton: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if use_triton:
        from radixkv.kernels import attention_launch

        return attention_launch.attention(batch, options, prefixes)
    return reference_attention.attention(batch, options, prefixes)


def _options(q: Tensor, k_pages: Pages, options: Options, tree_mask: Tensor | None) -> Attention:
    arguments.optional(tree_mask=tree_mask, sinks=options.get("sinks"), alibi_slopes=options.get("alibi_slopes"))
    tree = None
    if tree_mask is not None:
        checks.tree_mask_fits(tree_mask, q)
        tree = tree_bits(tree_mask.expand(q.shape[0], -1, -1))
    attention = Attention.of(q.shape[-1], tree, **options)
    checks.options_fit(attention, q.shape[-2], k_pages)
    return attention


def _choose(impl: str, pages: Pages) -> bool:
    """Whether Triton does it. Triton is imported only where it is used: a CPU's torch may come without it."""
    if impl not in checks.IMPLEMENTATIONS:
        raise BadRequest(f"impl {impl!r} is not one of {', '.join(checks.IMPLEMENTATIONS)}")
    if impl == "torch" or (impl == "auto" and not pages.is_cuda):
        return False
    if not pages.is_cuda:
        from radixkv.kernels import attention_launch

        if not attention_launch.INTERPRETED:
            raise BadRequest("the Triton kernels need CUDA tensors", device=str(pages.device))
    return True
