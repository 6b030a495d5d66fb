"""Where a setting comes from, who wins, and what a wrong one is answered with."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from radixkv.cli import settings
from radixkv.cli.flags import EventFlags, LimitFlags, ServerFlags
from radixkv.config import Config, EventsConfig, Limits, ServerConfig
from radixkv.errors import ConfigError

POOL = "name=default,layers=1,kv_heads=1,head_dim=8,dtype=float32,page_size=4,pages=8"


class Machine:
    """A machine with its environment and its files, made for one test."""

    def __init__(self, folder: Path) -> None:
        self.system_file = folder / "etc-radixkv.toml"
        self.file = folder / "mine.toml"
        self.environment: dict[str, str] = {}

    def load(
        self, flags: Mapping[str, str] | None = None, pools: Sequence[str] = (), config: Path | None = None
    ) -> Config:
        return settings.load(flags or {}, pools, self.environment, config=config, system_file=self.system_file)

    def refusal(self, flags: Mapping[str, str] | None = None, pools: Sequence[str] = ()) -> str:
        """The message of the ConfigError, which is one line."""
        config = self.file if self.file.exists() else None
        with pytest.raises(ConfigError) as caught:
            self.load(flags, pools, config)
        message = str(caught.value)
        assert "\n" not in message
        return message


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_nothing_said_gives_the_defaults(machine: Machine) -> None:
    config = machine.load()
    assert config == Config()
    assert config.pools[0].name == "default"
    assert config.pools[0].pages == 728


def test_a_flag_wins_over_environment_over_file_over_system_file_over_default(machine: Machine) -> None:
    assert machine.load().server.lease_s == 60.0
    machine.system_file.write_text("[server]\nlease_s = 50\n")
    assert machine.load().server.lease_s == 50
    machine.file.write_text("[server]\nlease_s = 40\n")
    assert machine.load(config=machine.file).server.lease_s == 40
    machine.environment["RADIXKV_SERVER__LEASE_S"] = "30"
    assert machine.load(config=machine.file).server.lease_s == 30
    assert machine.load({"server.lease_s": "20"}, config=machine.file).server.lease_s == 20


def test_keys_are_looked_for_one_by_one(machine: Machine) -> None:
    machine.system_file.write_text("[server]\ndrain_s = 1\nheartbeat_s = 2\n[limits]\ntokens = 3\n")
    machine.file.write_text("[server]\ndrain_s = 4\n")
    machine.environment["RADIXKV_LIMITS__SESSIONS"] = "5"
    config = machine.load({"limits.queued": "6"}, config=machine.file)
    assert config.server == ServerConfig(drain_s=4, heartbeat_s=2)
    assert config.limits == Limits(tokens=3, sessions=5, queued=6)


def test_the_config_variable_names_the_file_and_the_flag_wins(machine: Machine, tmp_path: Path) -> None:
    machine.file.write_text("[server]\nlease_s = 40\n")
    machine.environment["RADIXKV_CONFIG"] = str(machine.file)
    assert machine.load().server.lease_s == 40
    other = tmp_path / "other.toml"
    other.write_text("[server]\ndrain_s = 1\n")
    assert machine.load(config=other).server == ServerConfig(drain_s=1)


def test_pools_are_taken_as_a_whole_from_the_first_place_that_has_any(machine: Machine) -> None:
    machine.system_file.write_text('[[pool]]\nname = "a"\npages = 1\n[[pool]]\nname = "b"\npages = 2\n')
    assert [pool.name for pool in machine.load().pools] == ["a", "b"]
    machine.environment["RADIXKV_POOL"] = "name=c,pages=3;name=d,pages=4"
    assert [(pool.name, pool.pages) for pool in machine.load().pools] == [("c", 3), ("d", 4)]
    assert [pool.name for pool in machine.load(pools=["name=e,pages=1"]).pools] == ["e"]


def test_a_file_says_all_that_flags_can(machine: Machine) -> None:
    machine.file.write_text(
        """
        [server]
        endpoint = "ipc:///run/radixkv/radixkv.sock"
        lease_s = 30
        [limits]
        message_bytes = "1MiB"
        [[pool]]
        name = "default"
        layers = 1
        kv_heads = 1
        head_dim = 8
        dtype = "float32"
        page_size = 4
        pages = 8
        """
    )
    flags = {
        "server.endpoint": "ipc:///run/radixkv/radixkv.sock",
        "server.lease_s": "30",
        "limits.message_bytes": "1 MiB",
    }
    assert machine.load(config=machine.file) == machine.load(flags, [POOL])


def test_the_endpoint_variable_of_clients_is_the_daemons_too(machine: Machine) -> None:
    machine.environment["RADIXKV_ENDPOINT"] = "ipc:///tmp/a.sock"
    assert machine.load().server.endpoint == "ipc:///tmp/a.sock"
    machine.environment["RADIXKV_SERVER__ENDPOINT"] = "ipc:///tmp/b.sock"
    assert machine.load().server.endpoint == "ipc:///tmp/b.sock"
    assert machine.load({"server.endpoint": "ipc:///tmp/c.sock"}).server.endpoint == "ipc:///tmp/c.sock"


def test_other_variables_of_radixkv_are_left_alone(machine: Machine) -> None:
    machine.environment |= {"RADIXKV_HOME": "/x", "RADIXKV_REFERENCE_DIR": "/y", "PATH": "/bin"}
    assert machine.load() == Config()


@pytest.mark.parametrize("text", ["abc", "", "0", "-1", "nan", "inf", "1e9"])
def test_a_wrong_flag_names_key_value_origin_and_what_is_allowed(machine: Machine, text: str) -> None:
    message = machine.refusal({"server.lease_s": text})
    assert message.startswith("server.lease_s = ")
    assert "allowed: seconds from 0.1 to 86400" in message
    assert message.endswith("(from --lease-s)")


def test_the_origin_is_the_place_that_had_the_wrong_value(machine: Machine) -> None:
    machine.environment["RADIXKV_LIMITS__TOKENS"] = "many"
    message = machine.refusal()
    assert "limits.tokens = 'many'" in message
    assert "a whole number from 1 to 268435456" in message
    assert message.endswith("(from RADIXKV_LIMITS__TOKENS)")
    machine.environment.clear()
    machine.file.write_text("[limits]\ntokens = 1.5\n")
    assert machine.refusal().endswith(f"(from {machine.file})")


def test_settings_that_contradict_each_other_are_refused(machine: Machine) -> None:
    assert "less than lease_s" in machine.refusal({"server.lease_s": "2", "server.heartbeat_s": "2"})


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "radixkv.sock", "ipc://radixkv.sock", "ipc://"])
def test_only_local_absolute_endpoints_are_served(machine: Machine, endpoint: str) -> None:
    message = machine.refusal({"server.endpoint": endpoint})
    assert f"server.endpoint = {endpoint!r} is not allowed; allowed: ipc:// and an absolute path" in message


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("[server]\nleese_s = 1\n", ["'server.leese_s'", "did you mean server.lease_s", "server.keep_replies"]),
        ("[limit]\ntokens = 1\n", ["'limit'", "did you mean limits", "server, limits, events, pool"]),
        ("[[pool]]\npage = 1\n", ["'page'", "did you mean pages", "decode_reserve_pages"]),
        ("lease_s = 1\n", ["'lease_s'", "server, limits, events, pool"]),
        ("server = 1\n", ["server = 1", "[server]"]),
        ("[pool]\npages = 1\n", ["pool = ", "[[pool]]"]),
        ("[[pool]]\npages = true\n", ["pool.pages = True", "whole number"]),
        ("[server]\nlease_s = true\n", ["server.lease_s = True", "seconds"]),
        ("[server]\nendpoint = 5\n", ["server.endpoint = 5", "ipc://"]),
        ("[server\n", ["is not TOML", "line 1"]),
    ],
)
def test_a_wrong_file_is_refused_by_name(machine: Machine, content: str, parts: list[str]) -> None:
    machine.file.write_text(content)
    message = machine.refusal()
    assert str(machine.file) in message
    for part in parts:
        assert part in message


def test_a_file_that_is_not_there_is_refused(machine: Machine) -> None:
    machine.environment["RADIXKV_CONFIG"] = "/no/such/file.toml"
    assert machine.refusal() == "config = '/no/such/file.toml' cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("RADIXKV_SERVER__LEASE", ["did you mean RADIXKV_SERVER__LEASE_S", "RADIXKV_SERVER__DRAIN_S"]),
        ("RADIXKV_POOL__PAGES", ["RADIXKV_SERVER__KEY", "RADIXKV_LIMITS__KEY"]),
    ],
)
def test_an_unknown_variable_of_a_table_is_refused(machine: Machine, name: str, parts: list[str]) -> None:
    machine.environment[name] = "1"
    message = machine.refusal()
    assert repr(name) in message
    for part in parts:
        assert part in message


def test_two_pools_of_one_name_are_refused(machine: Machine) -> None:
    assert "pool.name = ['a', 'a'] is not allowed" in machine.refusal(pools=["name=a,pages=1", "name=a,pages=1"])


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"events.endpoint": "pub.sock"}, ["events.endpoint = 'pub.sock'", "ipc:// and an absolute path"]),
        ({"events.replay_endpoint": "tcp://h:1"}, ["events.replay_endpoint = 'tcp://h:1'", "beside events.endpoint"]),
        (
            {"events.endpoint": "tcp://h:1", "events.replay_endpoint": "tcp://h:1"},
            ["events.replay_endpoint = 'tcp://h:1'", "(from --events.replay-endpoint)"],
        ),
        ({"events.format": "json"}, ["events.format = 'json'", "array, map"]),
        ({"events.hash": "int32"}, ["events.hash = 'int32'", "int64, bytes"]),
        ({"events.rank": "-1"}, ["events.rank = -1", "from 0"]),
        ({"events.buffer_batches": "0"}, ["events.buffer_batches = 0", "from 1"]),
        ({"events.hwm": "0"}, ["events.hwm = 0", "from 1"]),
        ({"events.endpoint": "tcp://h:1"}, ["events.pool = ''", "the name of a pool: a, b"]),
        ({"events.endpoint": "tcp://h:1", "events.pool": "c"}, ["events.pool = 'c'", "the name of a pool: a, b"]),
    ],
)
def test_events_that_cannot_be_are_refused(machine: Machine, flags: dict[str, str], parts: list[str]) -> None:
    message = machine.refusal(flags, pools=["name=a,pages=1", "name=b,pages=1"])
    for part in parts:
        assert part in message


WHERE = "ipc:// and an absolute path of at most 107 bytes, tcp:// and host:port with a port from 1 to 65535"


@pytest.mark.parametrize("key", ["events.endpoint", "events.replay_endpoint"])
@pytest.mark.parametrize(
    "address",
    [
        *(f"tcp://127.0.0.1:{port}" for port in ("99999", "65536", "131071", "0", "-1", "+5", "2299x", "x", "", "*")),
        *("tcp://127.0.0.1", "tcp://*:*", "tcp://:5557", "tcp://", "tcp://127.0.0.1: 5557", "tcp://127.0.0.1:5557 "),
        *("tcp://h:1;h:2", "tcp://h:1:2", "tcp://h:\u0665", "udp://h:1"),
        *("ipc://" + "/" * 108, "ipc:///a\0b", "ipc://a"),
    ],
)
def test_an_address_that_is_none_is_refused_and_no_other_is_bound(machine: Machine, key: str, address: str) -> None:
    """ZeroMQ takes most of these, and listens somewhere else."""
    flags = {"events.endpoint": "tcp://h:1", key: address}
    flag = "--" + key.replace("_", "-")
    assert machine.refusal(flags) == f"{key} = {address!r} is not allowed; allowed: {WHERE} (from {flag})"


@pytest.mark.parametrize("address", ["tcp://*:1", "tcp://lo:65535", "tcp://10.0.0.1:5557", "tcp://[::1]:5557"])
def test_addresses_that_others_can_reach_are_taken(machine: Machine, address: str) -> None:
    assert machine.load({"events.endpoint": address}).events.endpoint == address


def test_no_file_can_name_a_socket_that_cannot_be(machine: Machine) -> None:
    machine.file.write_text('[server]\nendpoint = "ipc:///tmp/a\\u0000b"\n')
    assert "server.endpoint = 'ipc:///tmp/a\\x00b' is not allowed" in machine.refusal()


def test_one_pool_is_told_of(machine: Machine) -> None:
    pools = ["name=a,pages=1", "name=b,pages=1"]
    told = machine.load({"events.endpoint": "tcp://h:1", "events.pool": "b"}, pools=pools).told_pool
    assert told.name == "b"
    assert machine.load({"events.endpoint": "tcp://h:1"}, pools=pools[:1]).told_pool.name == "a"


def test_there_is_a_flag_for_every_server_setting_and_every_limit() -> None:
    assert [field.name for field in fields(EventFlags)] == [field.name for field in fields(EventsConfig)]
    assert [field.name for field in fields(ServerFlags)] == [field.name for field in fields(ServerConfig)]
    assert [field.name for field in fields(LimitFlags)] == [field.name for field in fields(Limits)]
