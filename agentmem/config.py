"""What a user may choose when opening a store; nothing else is configurable.

Knows nothing of how the choices are carried out.
"""

from dataclasses import dataclass, field

from agentmem._crypto import check_key
from agentmem.errors import InvalidInputError

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Choices for one open store.

    Attributes:
        block_size: Tokens per block. Part of every block's identity: a store opened with another size finds nothing
            of what was stored with this one.
        device_budget_nbytes: Most bytes of KV on the model's device, over all sessions. None: no limit.
        host_budget_nbytes: Most bytes of KV kept raw in RAM for branches that left the device.
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
        disk_reserve_nbytes: Free bytes of the file system that writes never touch, so that deletes always can run.
    """

    block_size: int = 64
    device_budget_nbytes: int | None = None
    host_budget_nbytes: int = 1 * GIB
    disk_budget_nbytes: int | None = None
    codec: str = "lossless"
    salt: bytes = field(default=b"", repr=False)
    encryption_key: bytes | None = field(default=None, repr=False)
    save_in_background: bool = True
    prefill_chunk_tokens: int = 2048
    gc_grace_s: float = 24 * 3600.0
    num_threads: int = 2
    lease_s: float = 60.0
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
        _require(self.gc_grace_s >= 0, "gc_grace_s", self.gc_grace_s, "0 or more seconds")
        _require(self.lease_s > 0, "lease_s", self.lease_s, "more than 0 seconds")
        _require(self.disk_reserve_nbytes >= 0, "disk_reserve_nbytes", self.disk_reserve_nbytes, "0 or more")
        disk = self.disk_budget_nbytes
        _require(disk is None or disk >= MIB, "disk_budget_nbytes", disk, "1 MiB or more, or None for no limit")
        if self.encryption_key is not None:
            check_key(self.encryption_key)
        budget = self.device_budget_nbytes
        _require(budget is None or budget > 0, "device_budget_nbytes", budget, "more than 0, or None for no limit")


def _require(is_right: bool, name: str, found: object, wanted: str) -> None:
    if not is_right:
        raise InvalidInputError(f"Config.{name} must be {wanted}; found {found!r}")
