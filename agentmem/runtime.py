"""What all branches of an open store share: the model, the tiers, the counters.

Knows nothing of sessions.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentmem._lmdb import Cipher, Environment
from agentmem.adapter import Adapter
from agentmem.config import Config
from agentmem.lake.lake import Lake
from agentmem.stats import Counters
from agentmem.tiers.blockstore import BlockStore
from agentmem.tiers.device import DeviceTier
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.host import HostTier
from agentmem.tiers.identity import Identity
from agentmem.tiers.lossy import LossyTier
from agentmem.tiers.lower import LowerTiers
from agentmem.tiers.media import MediaStore
from agentmem.tiers.remote import RecordTier
from agentmem.tiers.states import StateStore

_MAX_POOL_S = 365 * 86_400
"""Longest residency that a pool is told; it is renewed with each use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The parts of an open store with a model.

    Attributes:
        adapter: Runs the model.
        blocks: Saves and loads blocks.
        device: Allocates KV on the model's device.
        counters: What happened so far.
        config: The user's choices.
        identity: What every name in the store is derived from: the model, and the tenant.
        states: Saves and loads layer states.
        media: Saves and loads the model inputs behind marks.
    """

    adapter: Adapter
    blocks: BlockStore
    device: DeviceTier
    counters: Counters
    config: Config
    identity: Identity
    states: StateStore
    media: MediaStore


def make_runtime(
    environment: Environment,
    adapter: Adapter,
    config: Config,
    tiers: Sequence[RecordTier] = (),
    *,
    clock: Callable[[], float] = time.time,
) -> Runtime:
    """Join a model and the tiers of a store; `tiers` are one's own below the disk, nearer than those of the config."""
    counters = Counters()
    identity = Identity(adapter.look(), config.salt)
    device = DeviceTier(adapter.spec, adapter.device, config.device_budget_nbytes)
    host = HostTier(
        config.host_budget_nbytes, is_pinned=adapter.device.type == "cuda", policy=config.host_policy, clock=clock
    )
    device.bounce = host.lend
    disk = DiskTier(environment, clock=clock)
    blocks = BlockStore(
        spec=adapter.spec,
        identity=identity,
        host=host,
        disk=disk,
        codec=config.codec,
        num_threads=config.num_threads,
        is_saving=config.save_in_background,
        counters=counters,
        lower=LowerTiers([*tiers, *open_tiers(config, counters)], disk=disk, counters=counters),
    )
    return Runtime(
        adapter=adapter,
        blocks=blocks,
        device=device,
        counters=counters,
        config=config,
        identity=identity,
        states=StateStore(
            spec=adapter.spec,
            identity=identity,
            device=device,
            host=host,
            disk=disk,
            codec=config.codec,
            counters=counters,
        ),
        media=MediaStore(identity, host, disk),
    )


def open_tiers(config: Config, counters: Counters) -> list[RecordTier]:
    """Return the tiers below the disk that the user chose, the nearest first. No server is asked yet.

    Raises:
        InvalidInputError: A URL is none, or the package that a tier needs is not installed.
    """
    tiers: list[RecordTier] = []
    key = config.encryption_key
    if config.pool is not None:
        pool = importlib.import_module("agentmem.tiers.pool")  # which needs an extra
        cipher = None if key is None else Cipher(key)
        residency_s = max(1, round(min(config.residency.pool_s, _MAX_POOL_S)))
        tier = pool.PoolTier(config.pool, cipher=cipher, counters=counters, residency_s=residency_s)
        tiers.append(tier if config.pool_codec == "lossless" else LossyTier(tier, config.pool_codec))
    if config.lake is not None:
        tiers.append(Lake.open(config.lake, key=key))
    return tiers
