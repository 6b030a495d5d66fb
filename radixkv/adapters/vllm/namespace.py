"""What must be equal before two vLLM engines may share keys and values.

All of it goes through one canonical form (JSON with sorted keys, hashed with SHA-256 behind a word that says what it
is), so that a setting of one kind is never taken for one of another kind. Two engines that differ in anything here
miss; they never get each other's pages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from radixkv.client.namespace import Namespace

SALT_MAX = 256
"""Bytes of a cache salt that go into the namespace as they are; a longer one is hashed."""
MODEL_MAX = 200
"""Characters of the model's name that are shown; the whole name is in the digest of the engine."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "config.json", "adapter_config.json")


def digest(domain: str, value: Any) -> str:
    """Hexadecimal SHA-256 of a value's canonical form. What JSON does not know is taken by its ``str``."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(f"radixkv vllm {domain} 1\n{canonical}".encode(errors="surrogatepass")).hexdigest()


def files_of(path: str) -> list[tuple[str, int, int]]:
    """Name, bytes and time of change (ns) of the weights in a local directory; empty for the name of a hub."""
    try:
        files = {file for pattern in WEIGHTS for file in Path(path).glob(pattern)}
        return sorted((file.name, status.st_size, status.st_mtime_ns) for file in files for status in (file.stat(),))
    except OSError:  # no possible path, or a file that is being replaced
        return []


class Namespaces:
    """Namespaces of one engine's requests. ``settings``: everything of the engine that keys and values depend on."""

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        self._model = model[-MODEL_MAX:].encode("ascii", "replace").decode()
        self._engine = digest("engine", {"model": model, "files": files_of(model), **settings})

    def of(self, request: Any) -> Namespace:
        """The namespace of a vLLM request: its adapter, its salt, and where in it which image or sound is."""
        lora = request.lora_request
        extra = {"engine": self._engine}
        media = _media(request.mm_features)
        if media:
            extra["multimodal"] = digest("multimodal", media)
        return Namespace(
            model=self._model,
            lora=None if lora is None else digest("lora", [lora.lora_name, lora.lora_path, files_of(lora.lora_path)]),
            salt=_salt(request.cache_salt),
            extra=extra,
        )


def _salt(salt: str | None) -> str | bytes | None:
    """A long salt, or one that has no UTF-8 form, becomes bytes, which no other one is."""
    if salt is None or (len(salt.encode(errors="surrogatepass")) <= SALT_MAX and salt.isprintable()):
        return salt
    return bytes.fromhex(digest("salt", salt))


def _media(features: Iterable[Any]) -> list[list[Any]]:
    """vLLM puts the same placeholder tokens where any image stands; the identifier says which one it is."""
    return [[one.identifier, one.mm_position.offset, one.mm_position.length] for one in features]
