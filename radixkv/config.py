"""Everything that can be set, with its default, as frozen dataclasses. No I/O: reading files and flags is cli's work.

``KVSpec`` says what one page holds, ``Layout`` says where each number of it lies, ``PoolConfig``/``ServerConfig``/
``Limits`` say how the daemon behaves. Each refuses bad values with a ``ConfigError`` that names the key, the value and
what is allowed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from radixkv.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "int8": 1, "int4": 1}
"""What pages can hold, and the bytes of an element. Elements of quantized pages are bytes; one of int4 is two codes."""


class Quantization(NamedTuple):
    """How a head's numbers are coded: codes in a byte; numbers that share a scale; bytes of a scale, 0: there is none.

    What the codes mean is ``radixkv.kernels.quantized``.
    """

    codes_per_byte: int
    group: int
    scale_bytes: int

    def code_bytes(self, dims: int) -> int:
        return dims // self.codes_per_byte

    def scales(self, dims: int) -> int:
        """How many a head has."""
        return -(-dims // self.group) if self.scale_bytes else 0

    def row(self, heads: int, dims: int) -> tuple[int, int]:
        """(byte of a row where its scales begin, bytes of the row)."""
        begin = heads * self.code_bytes(dims)
        if not self.scale_bytes:
            return begin, begin
        begin = _up(begin, self.scale_bytes)
        return begin, _up(begin + heads * self.scales(dims) * self.scale_bytes, ROW_ALIGN_BYTES)


WHOLE_HEAD = 2**31
QUANTIZED = {
    "fp8_e4m3": Quantization(1, WHOLE_HEAD, 0),
    "int8": Quantization(1, WHOLE_HEAD, 4),
    "int4": Quantization(2, 32, 2),
}
ROW_ALIGN_BYTES = 16
"""Rows with scales are rounded up to it, so that kernels read codes as widely as they can."""

PAGE_ALIGN_BYTES = 256
LAST_PAGE_MODES = ("copy", "keep", "drop")
POLICIES = ("lru", "lfu", "fifo", "s3fifo")
"""Which cached page leaves first when pages run short; see ``radixkv.evictor``."""

HOST_WRITE_MODES = ("back", "through")
"""When pages are copied to the host tier: before they have to leave the device, or as soon as they are committed."""

EVENT_FORMATS = ("array", "map")
"""Events as arrays (as vLLM's up to 0.23) or as maps with a type (0.24 on)."""
EVENT_HASHES = ("int64", "bytes")

DEVICE = re.compile(r"cpu|cuda(:(\d{1,3}|GPU-[0-9a-f-]+)(\+(\d{1,3}|GPU-[0-9a-f-]+))*)?")
"""The machine's memory, or that of CUDA devices, one a rank, by number or UUID."""

_TCP = re.compile(r"tcp://(\[[^\]\s]+\]|[^\s:;\[\]\0]+):([1-9][0-9]{0,4})")
"""Host and port. ZeroMQ makes something of any port: it binds 34463 or 65535 for 99999 or -1."""
_PORT_MAX = 65535
_IPC = re.compile(r"ipc:///[^\0]+")
SOCKET_PATH_MAX = 107
"""Bytes a unix socket's path can have on Linux."""

PAGE_SIZE_MAX = 256
PAGES_MAX = 2**31 - 1
RANKS_MAX = 64
LAYOUT_ORDER = ("page", "layer", "kv", "token", "kv_head", "dim")


def _refuse(key: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{key} = {value!r} is not allowed; allowed: {allowed}")


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _whole(key: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _refuse(key, value, f"a whole number from {low} to {high}")


def _seconds(key: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _refuse(key, value, f"seconds from {low:g} to {high:g}")


def _is_address(address: str) -> bool:
    """Whether ZeroMQ would bind what is written there, and not something else."""
    if _IPC.fullmatch(address):
        return len(address.removeprefix("ipc://").encode(errors="surrogateescape")) <= SOCKET_PATH_MAX
    tcp = _TCP.fullmatch(address)
    return tcp is not None and int(tcp[2]) <= _PORT_MAX


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one page holds: keys and values of ``page_size`` consecutive tokens for all layers.

    One full-attention component. Multi-head latent attention stores one latent vector a token and layer instead of
    keys and values; ``bytes_per_token`` knows it (for ``radixkv plan``), pools refuse it by name.
    """

    layers: int = 30
    kv_heads: int = 3
    head_dim: int = 64
    dtype: str = "float32"
    page_size: int = 16
    mla_latent_dim: int = 0
    mla_rope_dim: int = 0

    def __post_init__(self) -> None:
        _whole("layers", self.layers, 1, 4096)
        _whole("kv_heads", self.kv_heads, 1, 4096)
        _whole("head_dim", self.head_dim, 1, 4096)
        _whole("page_size", self.page_size, 1, PAGE_SIZE_MAX)
        _whole("mla_latent_dim", self.mla_latent_dim, 0, 65536)
        _whole("mla_rope_dim", self.mla_rope_dim, 0, 65536)
        if self.dtype not in DTYPE_BYTES:
            raise _refuse("dtype", self.dtype, ", ".join(DTYPE_BYTES))
        if self.quantization is not None and self.row_dims[1] % self.quantization.codes_per_byte:
            raise _refuse("head_dim", self.row_dims[1], f"an even number with dtype {self.dtype}")

    @property
    def is_mla(self) -> bool:
        return self.mla_latent_dim > 0

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def quantization(self) -> Quantization | None:
        return QUANTIZED.get(self.dtype)

    @property
    def row_dims(self) -> tuple[int, int]:
        """Heads of a row (a token's keys, or values, or latents in one layer) and numbers of a head."""
        return (1, self.mla_latent_dim + self.mla_rope_dim) if self.is_mla else (self.kv_heads, self.head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; of a quantized one: all heads' codes, then all heads' scales, then up to the next 16."""
        heads, dims = self.row_dims
        return heads * dims * self.dtype_bytes if self.quantization is None else self.quantization.row(heads, dims)[1]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV cache one token takes, all layers, without the padding of pages."""
        return self.layers * (1 if self.is_mla else 2) * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes from one page to the next in the arena: the page's content rounded up to 256."""
        return _up(self.bytes_per_token * self.page_size, PAGE_ALIGN_BYTES)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each element of a page lies: the order of the dimensions and the stride of each, in elements.

    The default order is ``[page][layer][k, v][token][kv_head][dim]``, page 0 at offset 0 of the arena. An engine whose
    kernels want another order gets another Layout; views are made from the strides alone.

    Of quantized pages an element is a byte and ``head_stride`` is from one head's codes to the next's. A row, of
    ``token_stride`` bytes, has its scales behind all codes. They have no order but the default.
    """

    dtype: str
    layers: int
    page_size: int
    kv_heads: int
    head_dim: int
    page_stride: int
    layer_stride: int
    kv_stride: int
    token_stride: int
    head_stride: int
    dim_stride: int = 1
    order: tuple[str, ...] = LAYOUT_ORDER

    @classmethod
    def of(cls, spec: KVSpec) -> Layout:
        if spec.is_mla:
            raise _refuse("mla_latent_dim", spec.mla_latent_dim, "0 (pools hold one full-attention component)")
        how = spec.quantization
        head = spec.head_dim if how is None else how.code_bytes(spec.head_dim)
        token = spec.row_bytes // spec.dtype_bytes
        kv = spec.page_size * token
        return cls(
            dtype=spec.dtype,
            layers=spec.layers,
            page_size=spec.page_size,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            page_stride=spec.page_bytes // spec.dtype_bytes,
            layer_stride=2 * kv,
            kv_stride=kv,
            token_stride=token,
            head_stride=head,
        )

    @property
    def quantization(self) -> Quantization | None:
        return QUANTIZED.get(self.dtype)

    @property
    def row_shape(self) -> tuple[int, int]:
        """[kv_heads, head_dim] to whoever moves rows as they are: those of quantized pages are one piece of bytes."""
        return (self.kv_heads, self.head_dim) if self.quantization is None else (1, self.token_stride)

    def shape(self, pages: int) -> tuple[int, ...]:
        """[pages, layers, 2, page_size, *row_shape]: an arena to whoever moves rows as they are."""
        return (pages, self.layers, 2, self.page_size, *self.row_shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of ``shape``, in elements."""
        return (
            self.page_stride, self.layer_stride, self.kv_stride, self.token_stride, self.head_stride, self.dim_stride,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """The layout descriptor as it travels in the attach reply."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Layout:
        return cls(**{**fields, "order": tuple(fields["order"])})


DEFAULT_DEVICE_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One pool: pages of one KV spec on one device group, one trust domain.

    Each of ``ranks`` processes has an arena of its own: ``spec`` and ``arena_bytes`` say what *one* of them holds (with
    tensor parallelism: its share of the heads). Page ids mean the same on all.
    """

    name: str = "default"
    spec: KVSpec = field(default_factory=KVSpec)
    pages: int = 0
    decode_reserve_pages: int = 0
    session_floor_pages: int = 0
    session_cap_pages: int = 0
    namespaces: int = 1024
    policy: str = "lru"
    ranks: int = 1
    host_pages: int = 0
    host_staging_pages: int = 0
    reclaim_pages: int = -1
    host_write: str = "back"
    host_load_min_tokens: int = 0
    pin_limit_pages: int = -1
    namespace_floor_pages: int = 0
    namespace_cap_pages: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 64 or not self.name.isprintable():
            raise _refuse("pool.name", self.name, "1 to 64 printable characters")
        if self.spec.is_mla:
            raise _refuse("pool.mla_latent_dim", self.spec.mla_latent_dim, "0 (latent pages are not supported yet)")
        if self.pages == 0:
            object.__setattr__(self, "pages", DEFAULT_DEVICE_BYTES // self.spec.page_bytes)
        _whole("pool.pages", self.pages, 1, PAGES_MAX)
        _whole("pool.decode_reserve_pages", self.decode_reserve_pages, 0, self.pages - 1)
        _whole("pool.session_floor_pages", self.session_floor_pages, 0, self.pages)
        _whole("pool.session_cap_pages", self.session_cap_pages, 0, self.pages)
        _whole("pool.namespaces", self.namespaces, 1, 65536)
        if self.policy not in POLICIES:
            raise _refuse("pool.policy", self.policy, ", ".join(POLICIES))
        _whole("pool.ranks", self.ranks, 1, RANKS_MAX)
        self._check_device()
        _whole("pool.host_pages", self.host_pages, 0, PAGES_MAX - self.pages)
        _whole("pool.host_staging_pages", self.host_staging_pages, 0, PAGES_MAX - self.pages - self.host_pages)
        _whole("pool.reclaim_pages", self.reclaim_pages, -1, self.pages)
        if self.reclaim_pages == -1:
            object.__setattr__(self, "reclaim_pages", self.pages // 8 if self.host_pages else 0)
        if self.host_write not in HOST_WRITE_MODES:
            raise _refuse("pool.host_write", self.host_write, ", ".join(HOST_WRITE_MODES))
        _whole("pool.host_load_min_tokens", self.host_load_min_tokens, 0, 2**28)
        _whole("pool.pin_limit_pages", self.pin_limit_pages, -1, self.pages)
        if self.pin_limit_pages == -1:
            object.__setattr__(self, "pin_limit_pages", self.pages // 8)
        self._check_shares()
        if self.host_pages and self.policy != "lru":
            raise _refuse("pool.policy", self.policy, "lru with a host tier")
        if self.session_cap_pages and self.session_floor_pages > self.session_cap_pages:
            raise _refuse("pool.session_floor_pages", self.session_floor_pages, "at most session_cap_pages")

    def _check_device(self) -> None:
        if not DEVICE.fullmatch(str(self.device)):
            raise _refuse("pool.device", self.device, "cpu, cuda, cuda:0, cuda:GPU-UUID, one a rank: cuda:0+1")
        if ":" in self.device and len(self.cuda_devices) != self.ranks:
            raise _refuse("pool.device", self.device, f"as many devices as ranks ({self.ranks}), with + between them")

    def _check_shares(self) -> None:
        floor, cap = self.namespace_floor_pages, self.namespace_cap_pages
        _whole("pool.namespace_floor_pages", floor, 0, self.pages)
        _whole("pool.namespace_cap_pages", cap, 0, self.pages)
        if floor * self.namespaces > self.pages:
            allowed = f"at most pages / namespaces: {self.pages // self.namespaces} (so that all can be kept)"
            raise _refuse("pool.namespace_floor_pages", floor, allowed)
        if cap and floor > cap:
            raise _refuse("pool.namespace_floor_pages", floor, "at most namespace_cap_pages")
        if (floor or cap) and (self.policy != "lru" or self.host_pages):
            raise _refuse("pool.policy", self.policy, "lru without a host tier, with floors or caps of namespaces")

    @property
    def cuda_devices(self) -> tuple[str, ...]:
        """Number or UUID of each rank's device; none for the machine's memory."""
        if self.device == "cpu":
            return ()
        _, _, named = self.device.partition(":")
        return tuple(named.split("+")) if named else tuple(map(str, range(self.ranks)))

    @property
    def arena_bytes(self) -> int:
        """On the device, of one rank."""
        return self.pages * self.spec.page_bytes

    @property
    def host_arena_bytes(self) -> int:
        """In the host tier, of one rank."""
        return (self.host_pages + self.host_staging_pages) * self.spec.page_bytes if self.host_pages else 0

    @property
    def host_ranks(self) -> int:
        """How many host arenas there are."""
        return self.ranks if self.host_pages else 0

    @property
    def machine_bytes(self) -> int:
        """Of the machine's memory, by all ranks' arenas: of both tiers, unless the device tier is on a CUDA device."""
        return self.ranks * (self.host_arena_bytes + (0 if self.cuda_devices else self.arena_bytes))


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the daemon behaves. Times are seconds."""

    endpoint: str = ""
    lease_s: float = 60.0
    heartbeat_s: float = 5.0
    resume_timeout_s: float = 5.0
    drain_s: float = 10.0
    keep_replies: int = 64

    def __post_init__(self) -> None:
        _seconds("server.lease_s", self.lease_s, 0.1, 86400.0)
        _seconds("server.heartbeat_s", self.heartbeat_s, 0.01, 3600.0)
        _seconds("server.resume_timeout_s", self.resume_timeout_s, 0.0, 3600.0)
        _seconds("server.drain_s", self.drain_s, 0.0, 3600.0)
        _whole("server.keep_replies", self.keep_replies, 1, 1024)
        if self.heartbeat_s >= self.lease_s:
            raise _refuse("server.heartbeat_s", self.heartbeat_s, "less than lease_s")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a client can ask for. Everything a peer can make grow has one."""

    message_bytes: int = 16 * 2**20
    tokens: int = 1_048_576
    batch_items: int = 4096
    sessions: int = 256
    queued: int = 1024
    sequences_per_session: int = 65_536

    def __post_init__(self) -> None:
        _whole("limits.message_bytes", self.message_bytes, 1024, 2**30)
        _whole("limits.tokens", self.tokens, 1, 2**28)
        _whole("limits.batch_items", self.batch_items, 1, 2**20)
        _whole("limits.sessions", self.sessions, 1, 65536)
        _whole("limits.queued", self.queued, 0, 2**20)
        _whole("limits.sequences_per_session", self.sequences_per_session, 1, 2**24)


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """How routers are told which blocks of a pool are cached. An empty endpoint: they are not."""

    endpoint: str = ""
    replay_endpoint: str = ""
    pool: str = ""
    topic: str = ""
    format: str = "array"
    hash: str = "int64"
    rank: int = 0
    buffer_batches: int = 10_000
    hwm: int = 1000

    def __post_init__(self) -> None:
        for key in ("endpoint", "replay_endpoint"):
            address = getattr(self, key)
            if address and not _is_address(address):
                allowed = f"ipc:// and an absolute path of at most {SOCKET_PATH_MAX} bytes, tcp:// and host:port"
                raise _refuse(f"events.{key}", address, f"{allowed} with a port from 1 to {_PORT_MAX}")
        if self.replay_endpoint and (not self.endpoint or self.endpoint == self.replay_endpoint):
            raise _refuse("events.replay_endpoint", self.replay_endpoint, "one beside events.endpoint")
        if self.format not in EVENT_FORMATS:
            raise _refuse("events.format", self.format, ", ".join(EVENT_FORMATS))
        if self.hash not in EVENT_HASHES:
            raise _refuse("events.hash", self.hash, ", ".join(EVENT_HASHES))
        _whole("events.rank", self.rank, 0, 2**31 - 1)
        _whole("events.buffer_batches", self.buffer_batches, 1, 2**20)
        _whole("events.hwm", self.hwm, 1, 2**20)


@dataclass(frozen=True, slots=True)
class Config:
    """One daemon: its server settings, its limits, its pools, and what it tells routers."""

    server: ServerConfig = field(default_factory=ServerConfig)
    limits: Limits = field(default_factory=Limits)
    pools: tuple[PoolConfig, ...] = field(default_factory=lambda: (PoolConfig(),))
    events: EventsConfig = field(default_factory=EventsConfig)

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if not names:
            raise _refuse("pool", [], "at least one pool")
        if len(set(names)) != len(names):
            raise _refuse("pool.name", names, "names that differ")
        if self.events.endpoint and (self.events.pool or len(names) > 1) and self.events.pool not in names:
            raise _refuse("events.pool", self.events.pool, f"the name of a pool: {', '.join(names)}")

    @property
    def told_pool(self) -> PoolConfig:
        """The one whose events are published."""
        return next((pool for pool in self.pools if pool.name == self.events.pool), self.pools[0])
