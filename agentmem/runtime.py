"""What all branches of an open store share: the model, the tiers, the counters.

Knows nothing of sessions.
"""

from dataclasses import dataclass

from agentmem.adapter import Adapter
from agentmem.config import Config
from agentmem.stats import Counters
from agentmem.tiers.blockstore import BlockStore
from agentmem.tiers.device import DeviceTier
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
