"""Empty modules in place of third-party ones that a peer's cache code imports on its way and never calls.

They are not installed because they need a GPU or hundreds of megabytes. Any attribute of such a module is an object
that can be called, subclassed and looked into, so that class definitions and decorators get through the import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class _Empty(ModuleType):
    __path__ = []  # noqa: RUF012 (a package, to the import system)
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: frozenset[str]) -> None:
        self._roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(*roots: str) -> None:
    """Let ``import root`` (and anything below it) succeed for those of ``roots`` that are not installed."""
    missing = frozenset(root for root in roots if importlib.util.find_spec(root) is None)
    sys.meta_path.append(_Finder(missing))
