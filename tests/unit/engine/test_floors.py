"""A floor that cannot be kept is not promised."""

from radixkv.commands import Done, EndSession, Failure, OpenSession
from radixkv.config import Config, KVSpec, PoolConfig
from radixkv.engine.engine import Engine
from radixkv.engine.invariants import check


def test_a_session_is_refused_when_its_floor_cannot_be_promised():
    spec = KVSpec(layers=1, kv_heads=1, head_dim=8, page_size=4)
    engine = Engine(Config(pools=(PoolConfig(spec=spec, pages=8, session_floor_pages=3),)), "boot", "cache")
    replies = [engine.step(OpenSession(identity, bytes(16), "worker"), 0.0).reply for identity in (1, 2, 3)]
    assert replies[:2] == [Done(), Done()]
    refused = replies[2]
    assert isinstance(refused, Failure)
    assert refused.code == "limit_exceeded"
    assert refused.details == {"sessions": 2, "session_floor_pages": 3, "total_pages": 8}
    engine.step(EndSession(1, False, "gone"), 0.0)
    assert engine.step(OpenSession(4, bytes(16), "worker"), 0.0).reply == Done()
    check(engine)
