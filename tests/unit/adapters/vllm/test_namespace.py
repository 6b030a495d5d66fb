"""What keeps two engines or two requests apart, and what does not."""

import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.adapters.vllm.namespace import SALT_MAX, Namespaces, digest, files_of
from radixkv.client.namespace import CANONICAL_MAX_BYTES

ENGINE = {"revision": "a", "dtype": "torch.float32", "quantization": None}


def request(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"lora_request": None, "cache_salt": None, "mm_features": [], **fields})


def lora(name: str, path: str = "/adapters/a") -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=path)


def image(identifier: str, offset: int = 0, length: int = 8) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


REQUESTS = {
    "plain": request(),
    "salt": request(cache_salt="x"),
    "another salt": request(cache_salt="y"),
    "empty salt": request(cache_salt=""),
    "long salt": request(cache_salt="x" * (SALT_MAX + 1)),
    "another long salt": request(cache_salt="x" * (SALT_MAX + 2)),
    "a salt that looks like a long one": request(cache_salt=digest("salt", "x" * (SALT_MAX + 1))),
    "unprintable salt": request(cache_salt="x\n"),
    "no UTF-8": request(cache_salt="\ud800"),
    "adapter": request(lora_request=lora("x")),
    "another adapter": request(lora_request=lora("y")),
    "adapter elsewhere": request(lora_request=lora("x", "/adapters/b")),
    "name and path moved": request(lora_request=lora("x/adapters", "/a")),
    "image": request(mm_features=[image("x")]),
    "another image": request(mm_features=[image("y")]),
    "image elsewhere": request(mm_features=[image("x", offset=1)]),
    "larger image": request(mm_features=[image("x", length=9)]),
    "two images": request(mm_features=[image("x"), image("y", offset=8)]),
    "two images, exchanged": request(mm_features=[image("y"), image("x", offset=8)]),
    "image and salt": request(mm_features=[image("x")], cache_salt="x"),
}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(REQUESTS, 2)))
def test_requests_that_differ_share_nothing(one: str, other: str) -> None:
    namespaces = Namespaces("smollm2", ENGINE)
    assert namespaces.of(REQUESTS[one]) != namespaces.of(REQUESTS[other])


@pytest.mark.parametrize("name", REQUESTS)
def test_equal_requests_of_equal_engines_share(name: str) -> None:
    assert Namespaces("smollm2", ENGINE).of(REQUESTS[name]) == Namespaces("smollm2", dict(ENGINE)).of(REQUESTS[name])


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("smollm3", ENGINE),
        ("smollm2", {**ENGINE, "revision": "b"}),
        ("smollm2", {**ENGINE, "revision": None}),
        ("smollm2", {**ENGINE, "dtype": "torch.bfloat16"}),
        ("smollm2", {**ENGINE, "quantization": "fp8"}),
        ("smollm2", {**ENGINE, "dtype": None, "quantization": "torch.float32"}),
        ("smollm2", {**ENGINE, "more": 1}),
    ],
)
def test_engines_that_differ_share_nothing(model: str, settings: dict[str, Any]) -> None:
    assert Namespaces("smollm2", ENGINE).of(request()) != Namespaces(model, settings).of(request())


def test_other_weights_at_the_same_place_are_another_model(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"abcd")
    before = Namespaces(str(tmp_path), ENGINE).of(request())
    assert Namespaces(str(tmp_path), ENGINE).of(request()) == before
    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert Namespaces(str(tmp_path), ENGINE).of(request()) != before


def test_an_adapter_that_is_trained_further_is_another_one(tmp_path: Path) -> None:
    namespaces, weights = Namespaces("smollm2", ENGINE), tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"abcd")
    before = namespaces.of(request(lora_request=lora("x", str(tmp_path))))
    weights.write_bytes(b"abcde")
    assert namespaces.of(request(lora_request=lora("x", str(tmp_path)))) != before


def test_the_name_of_a_hub_has_no_files() -> None:
    assert files_of("nobody/there-is-no-such-directory") == []


def test_the_longest_namespace_fits() -> None:
    longest = request(
        cache_salt="\U0001f511" * (SALT_MAX // 4), lora_request=lora("x" * 9999), mm_features=[image("x" * 9999)]
    )
    canonical = Namespaces("\u00fc" * 9999, ENGINE).of(longest).canonical
    assert len(canonical) <= CANONICAL_MAX_BYTES
