"""What all branches of an open store share: the model, the tiers, the counters.

Knows nothing of sessions.
"""

from dataclasses import dataclass

from agentmem._lmdb import Environment
from agentmem.adapter import Adapter
from agentmem.config import Config
from agentmem.stats import Counters
from agentmem.tiers.blockstore import BlockStore
from agentmem.tiers.device import DeviceTier
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.host import HostTier
from agentmem.tiers.identity import Identity
from agentmem.tiers.media import MediaStore
from agentmem.tiers.states import StateStore


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


def make_runtime(environment: Environment, adapter: Adapter, config: Config) -> Runtime:
    """Join a model and the tiers of a store."""
    counters = Counters()
    identity = Identity(adapter.look(), config.salt)
    device = DeviceTier(adapter.spec, adapter.device, config.device_budget_nbytes)
    host = HostTier(config.host_budget_nbytes, is_pinned=adapter.device.type == "cuda")
    device.bounce = host.lend
    disk = DiskTier(environment)
    blocks = BlockStore(
        spec=adapter.spec,
        identity=identity,
        host=host,
        disk=disk,
        codec=config.codec,
        num_threads=config.num_threads,
        is_saving=config.save_in_background,
        counters=counters,
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
