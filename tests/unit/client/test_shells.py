"""The blocking and the asyncio client have the same names, arguments and documentation."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from radixkv import aio
from radixkv.client import sync

KINDS = ["Client", "Pool", "Sequence"]
INSTANT = {"make"}
"""What a pool's own parts call when a reply comes."""


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def calls(kind: type) -> dict[str, Any]:
    """What the shell itself defines, rather than what it inherits from the handles: that talks to the daemon."""
    return {name: member for name, member in vars(kind).items() if inspect.isfunction(member) and name[0] != "_"}


def parameters(call: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(call).parameters.values())


@pytest.mark.parametrize("name", KINDS)
def test_both_have_the_same_names(name: str) -> None:
    assert public(getattr(aio, name)) == public(getattr(sync, name))


@pytest.mark.parametrize("name", KINDS)
def test_what_talks_to_the_daemon_is_a_coroutine_with_the_same_arguments_and_documentation(name: str) -> None:
    blocking, awaited = calls(getattr(sync, name)), calls(getattr(aio, name))
    assert blocking.keys() == awaited.keys()
    assert len(blocking) > 2
    for call in blocking.keys() - INSTANT:
        assert inspect.iscoroutinefunction(awaited[call]), call
        assert parameters(awaited[call]) == parameters(blocking[call]), call
        assert awaited[call].__doc__ == blocking[call].__doc__, call


def test_both_connect_alike() -> None:
    assert parameters(aio.connect) == parameters(sync.connect)
    assert aio.connect.__doc__ == sync.connect.__doc__
