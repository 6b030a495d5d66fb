"""Which weights a model has, as a namespace: equal in every process that loaded the same ones, different otherwise."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import xxhash

from radixkv.client.namespace import Namespace

VOLATILE = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype", "use_cache"})
"""Parts of a configuration that change as a model is saved and loaded. Class and dtypes are digested as they are."""


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What a tensor was when it was digested. It is compared itself: another one may come to lie where it lay."""

    name: str
    tensor: ref[torch.Tensor]
    address: int
    version: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Stamp:
        return cls(name, ref(tensor), tensor.data_ptr(), _version(tensor))

    def fits(self, name: str, tensor: torch.Tensor) -> bool:
        there = (name, tensor.data_ptr(), _version(tensor))
        return self.tensor() is tensor and (self.name, self.address, self.version) == there


_known: WeakKeyDictionary[torch.nn.Module, tuple[list[_Stamp], str]] = WeakKeyDictionary()


def namespace_of(model: Any, salt: str | bytes | None = None) -> Namespace:
    """A namespace named by a digest of all parameters, buffers and the configuration.

    The digest (xxh3, 128 bits) reads the weights once a model, and again when one was replaced or changed in place
    by an operation that torch counts. One that it does not count (through ``.data``) is not noticed: then say which
    weights they are with a ``Namespace`` of your own.

    Raises ValueError for a model with adapters (PEFT): which of them is active is not a weight.
    """
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "a model with adapters loaded is not supported without a namespace, as they are switched on and off; "
            "allowed: a radixkv.Namespace of your own, with lora=..."
        )
    tensors, (stamps, digest) = _tensors(model), _known.get(model, ([], ""))
    as_it_was = len(stamps) == len(tensors) and all(map(_Stamp.fits, stamps, *zip(*tensors, strict=True)))
    if not (digest and as_it_was):
        digest = _digest(model)
        _known[model] = [_Stamp.of(*now) for now in tensors], digest
    return Namespace(model=f"xxh3:{digest}", salt=salt)


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
