"""What a user may choose when opening a store; nothing else is configurable.

Knows nothing of how the choices are carried out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentmem._crypto import check_key
from agentmem.errors import InvalidInputError
from agentmem.levels import LOSSY_CODECS

GIB = 1 << 30
MIB = 1 << 20


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    is_plain = ":" not in host or (host.startswith("[") and host.endswith("]"))
    return bool(host) and is_plain and port.isdecimal() and int(port) < 1 << 16


def _require(is_right: bool, name: str, found: object, wanted: str) -> None:
    if not is_right:
        raise InvalidInputError(f"Config.{name} must be {wanted}; found {found!r}")


class Resident(Protocol):
    """What a tier of a pyramid says of how long KV stays in it."""

    @property
    def residency_s(self) -> tuple[float, float]:
        """Seconds at least, and at most."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """How long KV that nobody touches stays in each tier before it sinks; by default for ever.

    Attributes:
        device_s: Seconds after which a branch leaves the device.
        host_s: Seconds after which a block leaves host memory, for the pool where there is one.
        pool_s: Seconds after which the pool forgets a block.
        disk_s: Seconds after which a session that is not open sinks from the disk to the lake.
    """

    device_s: float = math.inf
    host_s: float = math.inf
    pool_s: float = 6 * 3600.0
    disk_s: float = math.inf

    def __post_init__(self) -> None:
        """Refuse times that cannot be.

        Raises:
            InvalidInputError: A time is not above 0.
        """
        for name in ("device_s", "host_s", "pool_s", "disk_s"):
            value = getattr(self, name)
            _require(value > 0, f"residency.{name}", value, "more than 0 seconds")

    @classmethod
    def of(cls, pyramid: "Sequence[Resident]") -> "Residency":
        """Return the residencies of a pyramid of five tiers, such as `agentmem.micron_pyramid()`: the longest of each.

        Raises:
            InvalidInputError: It has not five tiers.
        """
        _require(len(pyramid) == 5, "residency", len(pyramid), "of a pyramid of five tiers")
        device, host, pool, disk = (tier.residency_s[1] for tier in pyramid[:4])
        return cls(device_s=device, host_s=host, pool_s=pool, disk_s=disk)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Choices for one open store.

    Attributes:
        block_size: Tokens per block. Part of every block's identity: a store opened with another size finds nothing
            of what was stored with this one.
        device_budget_nbytes: Most bytes of KV on the model's device, over all sessions. None: no limit.
        host_budget_nbytes: Most bytes of KV kept raw in RAM for branches that left the device.
        host_policy: Who leaves host memory first: "lru", "slru" or "arc". For agents LRU is best (docs/simulation.md).
        disk_budget_nbytes: Most bytes that this handle lets the data file have in use: blocks, states, media, tokens,
            metadata and LMDB's own trees. When it is short, what was dropped goes at once. None: no limit.
        codec: How blocks are stored on disk: "lossless" (nib) or "raw". Either is bit-exact.
        salt: Bytes that keep two tenants from sharing blocks, and one from finding out what another has stored.
        encryption_key: 32 bytes, for a store whose files tell nothing to who has not the key; see
            `agentmem.key_from_passphrase`. None: not encrypted.
        save_in_background: Encode and write sealed blocks while the model goes on. When False, blocks are written
            only by `checkpoint`, `flush`, eviction and `close`.
        prefill_chunk_tokens: Most tokens fed in one forward pass when pending tokens are computed.
        gc_grace_s: Seconds for which what was dropped can still be brought back.
        num_threads: Threads that decode and encode when the caller waits for them.
        lease_s: Seconds after which other processes may take over the sessions of one that no longer runs its threads,
            as when it was stopped. Those of one that died are free at once.
        pool: URL of the pool, tier 3, a server that speaks the Redis protocol: "redis://host:6379/0" (docs/tiers.md).
            It may hold a password, which is never printed. None: no pool.
        pool_codec: How blocks are kept in the pool: "lossless", or lossily, as "q1" (nearest to exact) to "q4"
            (smallest); docs/tiers.md says what each costs. What comes back from a lossy pool is approximate, and the
            report says so.
        lake: URL of the lake, tier 5, as "s3://bucket/prefix", or path of a directory (docs/lake.md); credentials come
            from the environment of the service. None: no lake.
        residency: How long KV that nobody touches stays in each tier. By default it stays until a budget is short.
        metrics: "HOST:PORT" at which the store's numbers are served over HTTP while it is open, for Prometheus and
            `agentmem top` (docs/observability.md); port 0 takes any that is free. None: nothing is served.
        disk_reserve_nbytes: Free bytes of the file system that writes never touch, so that deletes always can run.
    """

    block_size: int = 64
    device_budget_nbytes: int | None = None
    host_budget_nbytes: int = 1 * GIB
    host_policy: str = "lru"
    disk_budget_nbytes: int | None = None
    codec: str = "lossless"
    salt: bytes = field(default=b"", repr=False)
    encryption_key: bytes | None = field(default=None, repr=False)
    save_in_background: bool = True
    prefill_chunk_tokens: int = 2048
    gc_grace_s: float = 24 * 3600.0
    num_threads: int = 2
    lease_s: float = 60.0
    pool: str | None = field(default=None, repr=False)
    pool_codec: str = "lossless"
    lake: str | None = None
    residency: Residency = Residency()
    metrics: str | None = None
    disk_reserve_nbytes: int = 64 * MIB

    def __post_init__(self) -> None:
        """Refuse choices that cannot work.

        Raises:
            InvalidInputError: A value is out of range; the message names it.
        """
        _require(16 <= self.block_size <= 512, "block_size", self.block_size, "16 to 512 tokens")
        _require(self.codec in {"lossless", "raw"}, "codec", self.codec, "'lossless' or 'raw'")
        _require(self.num_threads >= 1, "num_threads", self.num_threads, "at least 1")
        _require(self.prefill_chunk_tokens >= 1, "prefill_chunk_tokens", self.prefill_chunk_tokens, "at least 1")
        _require(self.host_budget_nbytes >= 0, "host_budget_nbytes", self.host_budget_nbytes, "0 or more")
        _require(self.host_policy in {"lru", "slru", "arc"}, "host_policy", self.host_policy, "'lru', 'slru' or 'arc'")
        _require(self.gc_grace_s >= 0, "gc_grace_s", self.gc_grace_s, "0 or more seconds")
        _require(self.lease_s > 0, "lease_s", self.lease_s, "more than 0 seconds")
        _require(self.disk_reserve_nbytes >= 0, "disk_reserve_nbytes", self.disk_reserve_nbytes, "0 or more")
        disk = self.disk_budget_nbytes
        _require(disk is None or disk >= MIB, "disk_budget_nbytes", disk, "1 MiB or more, or None for no limit")
        scheme = None if self.pool is None else self.pool.partition("://")[0] if "://" in self.pool else "no URL"
        _require(scheme in {None, "redis", "rediss", "unix"}, "pool", scheme, "a redis://, rediss:// or unix:// URL")
        is_known = self.pool_codec in {"lossless", *LOSSY_CODECS}
        _require(is_known, "pool_codec", self.pool_codec, f"'lossless' or one of {', '.join(LOSSY_CODECS)}")
        is_place = self.lake is None or "://" in self.lake or self.lake.startswith(("/", "."))
        _require(is_place, "lake", self.lake, "a URL, as s3://bucket/prefix, or a path that begins with '/' or '.'")
        is_address = self.metrics is None or _is_address(self.metrics)
        _require(is_address, "metrics", self.metrics, "HOST:PORT, as 127.0.0.1:9464; port 0 takes any that is free")
        if self.encryption_key is not None:
            check_key(self.encryption_key)
        budget = self.device_budget_nbytes
        _require(budget is None or budget > 0, "device_budget_nbytes", budget, "more than 0, or None for no limit")
