"""Packages that only some commands need, asked for before they are imported."""

from __future__ import annotations

import importlib.util

from radixkv.errors import ConfigError

TRANSFORMERS = ("torch", "transformers", "safetensors", "gguf", "accelerate")


def install(extra: str) -> str:
    """What brings the packages of ``extra``."""
    return f"pip install -e '.[{extra}]' in the checkout"


def require(packages: tuple[str, ...], extra: str) -> None:
    """Errors: ConfigError when one of ``packages`` is not installed; it names the extra that brings them."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"not installed: {', '.join(missing)}; {install(extra)}")
