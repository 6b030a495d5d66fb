"""Which weights a model has, as a namespace: equal in every process that loaded the same ones, different otherwise."""

from __future__ import annotations

import json
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash

from radixkv.client.namespace import Namespace

VOLATILE = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype", "use_cache"})
"""Parts of a configuration that change as a model is saved and loaded. Class and dtypes are digested as they are."""

Stamp = tuple[tuple[str, int, int], ...]
_known: WeakKeyDictionary[torch.nn.Module, tuple[Stamp, str]] = WeakKeyDictionary()


def namespace_of(model: Any, salt: str | bytes | None = None) -> Namespace:
    """A namespace named by a digest of all parameters, buffers and the configuration.

    The digest (xxh3, 128 bits) reads the weights once a model, and again when one was replaced or changed in place
    by an operation that torch counts. One that it does not count (through ``.data``) is not noticed: then say which
    weights they are with a ``Namespace`` of your own.
    """
    stamp = tuple((name, tensor.data_ptr(), _version(tensor)) for name, tensor in _tensors(model))
    known = _known.get(model)
    if known is None or known[0] != stamp:
        known = _known[model] = (stamp, _digest(model))
    return Namespace(model=f"xxh3:{known[1]}", salt=salt)


def _digest(model: Any) -> str:
    digest = xxhash.xxh3_128()
    settings = {key: value for key, value in model.config.to_dict().items() if key not in VOLATILE}
    digest.update(json.dumps([type(model).__name__, settings], sort_keys=True, default=str).encode())
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


def _tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
