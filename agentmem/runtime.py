"""What all branches of an open store share: the model, the tiers, the counters.

Knows nothing of sessions.
"""

from dataclasses import dataclass

from agentmem.adapter import Adapter
from agentmem.config import Config
from agentmem.ids import BlockHash
from agentmem.stats import Counters
from agentmem.tiers.blockstore import BlockStore
from agentmem.tiers.device import DeviceTier


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The parts of an open store with a model.

    Attributes:
        adapter: Runs the model.
        blocks: Saves and loads blocks.
        device: Allocates KV on the model's device.
        counters: What happened so far.
        config: The user's choices.
        root: The token name of the empty prefix under this model and salt.
    """

    adapter: Adapter
    blocks: BlockStore
    device: DeviceTier
    counters: Counters
    config: Config
    root: BlockHash
