"""Chain hashes name pages for others: the same content has the same name in every daemon, other content another."""

from fuzz.pairs.worker import NAMESPACE, workers
from fuzz.weak import weak_hash
from radixkv.hashing import chain, last, namespace_root


def test_names_are_part_of_the_format() -> None:
    root = namespace_root(b"model", 0)
    assert root.hex() == "cfbcf861e899368ee337695f5b38705f"
    assert namespace_root(b"model", 1).hex() == "8d9356413ae8bcd77935c2955a1f8c28"
    assert chain(root, bytes(range(32)), 16).hex() == "1af9ee764b9df37234618326cbbafe5b12f20c7efcb389173598c0b2a1866a4a"


def test_each_page_is_named_by_the_one_before_it() -> None:
    root, tokens = namespace_root(b"model", 0), bytes(range(48))
    whole = chain(root, tokens, 16)
    assert chain(last(whole[:16]), tokens[16:], 16) == whole[16:]
    assert chain(root, tokens[16:], 16)[:16] != whole[16:32]


def test_what_an_invalidation_did_away_with_never_returns_under_its_name() -> None:
    pair, one = workers(8, 1)
    names = []
    for _ in range(3):
        one.cache(range(4))
        ((child,),) = [pair.real.pools["a"].namespaces.find(NAMESPACE).root.children.values()]
        names.append(bytes(child.hashes))
        one.invalidate()
    assert len(set(names)) == 3


def test_namespaces_whose_hashes_collide_stay_apart() -> None:
    with weak_hash():
        _, one = workers(8, 1)
        assert namespace_root(b"ab", 0) == namespace_root(b"ba", 0)
        one.cache(range(4), b"ab")
        assert (one.lookup(range(4), b"ab"), one.lookup(range(4), b"ba")) == (4, 0)
