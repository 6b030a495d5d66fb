"""The public kernels: check the arguments, choose an implementation.

``impl``: "auto" is Triton for CUDA tensors and torch otherwise; "torch" is the reference, on any device; "triton" needs
CUDA tensors (or Triton's interpreter, for tests). Every refusal is a BadRequest that names the argument.

``check_values`` reads lengths, page ids and slots before a Triton kernel is launched on a CUDA device, and so waits for
it. Everywhere else they are always read and checked.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from radixkv.errors import BadRequest
from radixkv.kernels import checks, reference
from radixkv.kernels.layout import LayerPages

Impl = Literal["auto", "triton", "torch"]


@overload
def decode_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, *,
    scale: float | None = None, return_lse: Literal[False] = False, impl: Impl = "auto", check_values: bool = False,
) -> Tensor: ...  # fmt: skip
@overload
def decode_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, *,
    scale: float | None = None, return_lse: Literal[True], impl: Impl = "auto", check_values: bool = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def decode_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, *,
    scale: float | None = None, return_lse: bool = False, impl: Impl = "auto", check_values: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of one query token a row over the row's first ``lengths[b]`` tokens.

    q [B, Hq, D]; k_pages, v_pages [P, S, Hkv, D], any strides, Hq a multiple of Hkv (query head h reads KV head
    h // (Hq // Hkv)); page_table [B, M] int32, entry i of a row holds tokens [i * S, (i + 1) * S), entries behind the
    length may be anything (-1 by custom); lengths [B] int32, 0 is legal. scale: 1 / sqrt(D) if None.

    Returns out [B, Hq, D] in q's dtype, with return_lse also lse [B, Hq] float32: the natural logarithm of the sum of
    exponentials of the scaled scores. An empty row gives zeros and -inf. Nothing but the first ``lengths[b]`` tokens
    has any effect, be it NaN. Where values are not checked, a length beyond the table or a page id out of the pool
    gives a row of NaN and a negative length counts as 0; memory outside the pool is never touched.
    """
    checks.decode_shapes(q, k_pages, v_pages, page_table, lengths)
    use_triton = _choose(impl, k_pages)
    if check_values or not (use_triton and k_pages.is_cuda):
        checks.decode_values(page_table, lengths, k_pages.shape[0], k_pages.shape[1])
    pages = LayerPages(k_pages, v_pages)
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    if use_triton:
        from radixkv.kernels import triton_decode

        out, lse = triton_decode.decode_attention(q, pages, page_table, lengths, scale)
    else:
        out, lse = reference.decode_attention(q, pages, page_table, lengths, scale)
    return (out, lse) if return_lse else out


def append(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, *,
    impl: Impl = "auto", check_values: bool = False,
) -> None:  # fmt: skip
    """Write the keys and values of T tokens into their slots.

    k, v [T, Hkv, D]; slots [T] int64, slot = page * page_size + row, -1 skips the token. Slots other than -1 differ;
    which token wins where they do not is not defined. Where values are not checked, a slot out of the pool is skipped.
    """
    checks.append_shapes(k, v, k_pages, v_pages, slots)
    use_triton = _choose(impl, k_pages)
    if check_values or not (use_triton and k_pages.is_cuda):
        checks.append_values(slots, k_pages.shape[0], k_pages.shape[1])
    if use_triton:
        from radixkv.kernels import triton_write

        triton_write.append(k, v, k_pages, v_pages, slots)
    else:
        reference.append(k, v, k_pages, v_pages, slots)


def copy_rows(pages: Tensor, rows: Tensor, *, impl: Impl = "auto", check_values: bool = False) -> None:
    """For each (source page, target page, n) of ``rows`` [N, 3] int32: the first n token rows of source into target.

    ``pages`` is any view [pages, ..., page_size, kv_heads, head_dim] with up to two dimensions in the middle, all of
    which are copied: one layer's keys or values [P, S, H, D], one layer's both [P, 2, S, H, D], or the whole arena
    [P, layers, 2, S, H, D] (``arena_view``), which is what copy_rows of a reply means. The entries are carried out as
    if one after the other, so a source may be an earlier entry's target. Where values are not checked, an entry that
    is out of range is skipped.
    """
    checks.copy_shapes(pages, rows)
    use_triton = _choose(impl, pages)
    if check_values or not (use_triton and pages.is_cuda):
        checks.copy_values(rows, pages.shape[0], pages.shape[-3])
    if use_triton:
        from radixkv.kernels import triton_write

        triton_write.copy_rows(pages, rows)
    else:
        reference.copy_rows(pages, rows)


def _choose(impl: str, pages: Tensor) -> bool:
    """Whether Triton does it. Triton is imported only where it is used: a CPU's torch may come without it."""
    if impl not in checks.IMPLEMENTATIONS:
        raise BadRequest(f"impl {impl!r} is not one of {', '.join(checks.IMPLEMENTATIONS)}")
    if impl == "torch" or (impl == "auto" and not pages.is_cuda):
        return False
    if not pages.is_cuda:
        from radixkv.kernels import triton_decode

        if not triton_decode.INTERPRETED:
            raise BadRequest("the Triton kernels need CUDA tensors", device=str(pages.device))
    return True
