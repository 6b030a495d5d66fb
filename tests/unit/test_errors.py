"""Errors cross processes whole: by pickle as they are, by wire by their code."""

import pickle

import pytest

from radixkv.errors import BY_CODE, ConfigError, OutOfPages, RadixKVError, from_code

NUMBERS = {"need": 3, "available": 1, "waited_s": 0.5, "never_fits": True}


@pytest.mark.parametrize("kind", [*BY_CODE.values(), ConfigError, RadixKVError])
def test_an_error_is_the_same_in_another_process(kind: type[RadixKVError]) -> None:
    error = kind("as it was", **(NUMBERS if kind is OutOfPages else {"limit": 7}))
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.details) == (kind, str(error), error.details)


def test_a_code_that_is_not_known_is_the_root() -> None:
    assert type(from_code("from_the_future", "x", {})) is RadixKVError
    assert type(from_code("timeout", "x", {})) is BY_CODE["timeout"]
