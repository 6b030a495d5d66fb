"""Chain hashes name pages for others: the same content has the same name in every daemon, other content another."""

from radixkv.hashing import chain, namespace_root, page_hash


def test_names_are_part_of_the_format() -> None:
    root = namespace_root(b"model", 0)
    assert root.hex() == "cfbcf861e899368ee337695f5b38705f"
    assert namespace_root(b"model", 1).hex() == "8d9356413ae8bcd77935c2955a1f8c28"
    assert chain(root, bytes(range(32)), 16).hex() == "1af9ee764b9df37234618326cbbafe5b12f20c7efcb389173598c0b2a1866a4a"


def test_each_page_is_named_by_the_one_before_it() -> None:
    root, tokens = namespace_root(b"model", 0), bytes(range(48))
    whole = chain(root, tokens, 16)
    assert chain(whole[:16], tokens[16:], 16) == whole[16:]
    assert page_hash(whole[16:32], tokens[32:]) == whole[32:]
    assert chain(root, tokens[16:], 16)[:16] != whole[16:32]
