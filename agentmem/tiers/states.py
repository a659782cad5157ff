"""Layer states: what the layers keep that cannot be cut by token, as it was after some number of tokens.

A state is immutable: a pass works on copies and leaves new tensors behind, so that branches share states freely. Knows
nothing of tokens beyond a position and a name.
"""

import logging
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from agentmem._future import Future
from agentmem.errors import CorruptionError, NotFoundError
from agentmem.ids import BlockDigest, BlockHash
from agentmem.kv import record as record_format
from agentmem.kv.hashing import part_hash
from agentmem.kv.record import Record
from agentmem.kv.spec import KVSpec
from agentmem.stats import Counters
from agentmem.tiers.device import DeviceTier
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.host import HostTier
from agentmem.tiers.identity import Identity
from agentmem.tiers.runs import Storage

logger = logging.getLogger(__name__)


class LayerState:
    """All layer states after `position` tokens.

    Attributes:
        position: Tokens that it has seen.
        name: Names those tokens; None until somebody wants to find or keep it.
        digests: Its records, one per dtype; None until they are being saved.
        tensors: On the model's device; None while they are elsewhere.
    """

    __slots__ = ("__weakref__", "digests", "name", "position", "storage", "stored", "tensors")

    def __init__(
        self,
        position: int,
        tensors: list[Tensor] | None = None,
        *,
        name: BlockHash | None = None,
        digests: tuple[BlockDigest, ...] | None = None,
    ) -> None:
        self.position = position
        self.name = name
        self.digests = digests
        self.tensors = tensors
        self.storage: Storage | None = None
        """Counts the tensors against the device budget."""
        self.stored: list[Future[None]] = []

    @property
    def is_lost(self) -> bool:
        """Whether it was found to be in no tier any more."""
        return self.tensors is None and self.digests is None

    @property
    def failure(self) -> BaseException | None:
        """Why it did not reach the disk, if so."""
        failures = (stored.exception() for stored in self.stored if stored.done())
        return next((failure for failure in failures if failure is not None), None)


class StateStore:
    """Layer states of one model over the tiers of one store. Thread-safe."""

    def __init__(
        self,
        *,
        spec: KVSpec,
        identity: Identity,
        device: DeviceTier,
        host: HostTier,
        disk: DiskTier,
        codec: str,
        counters: Counters,
    ) -> None:
        """Join the tiers."""
        self._spec = spec
        self._identity = identity
        self._device = device
        self._host = host
        self._disk = disk
        self._codec = codec
        self._counters = counters
        self._known: weakref.WeakValueDictionary[BlockHash, LayerState] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def claim(self, num_states: int = 1) -> Storage | None:
        """Count layer states that a pass is about to leave, before it allocates them; None for a model without.

        Raises:
            CapacityError: They do not fit the device budget.
        """
        nbytes = num_states * self._spec.state_nbytes
        return self._device.claim(nbytes) if nbytes else None

    def hold(self, position: int, tensors: Sequence[Tensor], storage: Storage | None = None) -> LayerState:
        """Take over tensors that nobody writes any more, as the state after `position` tokens.

        Args:
            position: Tokens that it has seen.
            tensors: What the pass left.
            storage: What counts them already; None: they are counted now.

        Raises:
            CapacityError: They do not fit the device budget.
        """
        state = LayerState(position, list(tensors))
        state.storage = storage or self._device.claim(sum(tensor.nbytes for tensor in tensors))
        return state

    def name(self, state: LayerState, name: BlockHash) -> None:
        """Let others find the state by the tokens that it has seen."""
        state.name = name
        with self._lock:
            self._known.setdefault(name, state)

    def find(self, name: BlockHash, position: int, *, num_parts: int | None = None) -> LayerState | None:
        """Return a state of these tokens, computed by whomever, or None."""
        with self._lock:
            state = self._known.get(name)
        if state is not None:
            return state
        count = len(self._dtypes()) if num_parts is None else num_parts
        found = [self._disk.find(part_hash(name, part)) for part in range(count)]
        digests = tuple(digest for digest in found if digest is not None)
        return None if len(digests) < count else LayerState(position, name=name, digests=digests)

    def save(self, state: LayerState) -> None:
        """Hand a named state to the disk's writer, if that was not done; afterwards it has its digests.

        Raises:
            StorageFullError: The disk has no room.
            ReadOnlyError: The store cannot be written.
        """
        if state.name is None or state.tensors is None or (state.digests is not None and state.failure is None):
            return
        state.stored = []
        packed = self.pack(state)
        for record in packed:
            state.stored.append(self._disk.store([record]))
            self._counters.add("device_to_disk_nbytes", record.raw_nbytes)
        state.digests = tuple(record.digest for record in packed)
        self._counters.add("states_saved")

    def pack(self, state: LayerState) -> list[Record]:
        """Return the records of a named state that is on the device; none for any other."""
        if state.name is None or state.tensors is None:
            return []
        return [
            record_format.pack(
                [self._section(tensor) for tensor in tensors],
                block_hash=part_hash(state.name, part),
                fingerprint=self._identity.fingerprint,
                start=state.position,
                codec=self._codec,
            )
            for part, tensors in enumerate(self._parts(state.tensors))
        ]

    def load(self, state: LayerState) -> tuple[list[Tensor], str]:
        """Return the state's tensors on the device, and the tier that had them. Nobody may write to them.

        Raises:
            NotFoundError: They are in no tier.
            CorruptionError: Their stored bytes are damaged.
            CapacityError: They do not fit the device budget.
        """
        if state.tensors is not None:
            return state.tensors, self._device.name
        if state.digests is None:
            raise NotFoundError(f"the layer state after {state.position:,} tokens was never saved")
        for stored in state.stored:
            stored.result()
        storage = self._device.claim(sum(self._part_nbytes(digest) for digest in state.digests))
        parts, tiers = zip(*(self._load_part(digest) for digest in state.digests), strict=True)
        tensors = self._unite(parts)
        state.tensors = [tensor.to(self._device.device) for tensor in tensors]
        state.storage = storage
        self._counters.add("states_loaded")
        return state.tensors, self._disk.name if self._disk.name in tiers else self._host.name

    def cool(self, state: LayerState) -> None:
        """Let the device forget a state that was handed to the disk; the host tier keeps it, if it fits.

        It stays where it is while neither has it for good.
        """
        tensors = state.tensors
        if tensors is None or state.digests is None or state.failure is not None:
            return
        parts = zip(state.digests, self._parts(tensors), strict=True)
        in_host = [self._keep_in_host(digest, part) for digest, part in parts]
        if all(in_host) or not state.stored:
            state.tensors = state.storage = None
        else:
            for stored in state.stored:
                stored.add_done_callback(lambda _: _release_when_saved(state))

    def forget_damaged(self, state: LayerState) -> None:
        """Forget a state whose stored bytes are bad, so that computing it again writes it again."""
        self._counters.add("states_damaged")
        for digest in state.digests or ():
            self._host.remove(digest)
            self._disk.mark_damaged(digest)
        self.forget(state)

    def forget(self, state: LayerState) -> None:
        """Let all that share a state know that it is not to be had, so that nobody looks for it again."""
        with self._lock:
            if state.name is not None:
                self._known.pop(state.name, None)
        state.digests = None

    def raise_failure(self, state: LayerState) -> None:
        """Raise the error for which the state did not reach the disk, if any; `save` may be tried again."""
        if state.failure is not None:
            raise state.failure

    def _keep_in_host(self, digest: BlockDigest, part: Sequence[Tensor]) -> bool:
        """Copy one record's tensors to the host tier, if it lacks them; False when they do not fit its budget."""
        return self._host.contains(digest) or self._host.store(digest, [self._section(tensor) for tensor in part])

    def _load_part(self, digest: BlockDigest) -> tuple[list[Tensor], str]:
        """Return the tensors of one record, and the tier that had them."""
        sections = self._host.fetch(digest)
        if sections is not None:
            return sections, self._host.name
        data = self._disk.load_record(digest)
        meta = record_format.read_meta(data)
        dtype = getattr(torch, meta.dtype)
        sections = [torch.empty(section.shape, dtype=dtype) for section in meta.sections]
        record_format.unpack(data, sections)
        return sections, self._disk.name

    def _part_nbytes(self, digest: BlockDigest) -> int:
        """Return the bytes of one record's tensors, wherever they are."""
        nbytes = self._host.nbytes_of(digest)
        return self._disk.raw_nbytes(digest) if nbytes is None else nbytes

    def _dtypes(self) -> list[str]:
        return list(dict.fromkeys(state.dtype for state in self._spec.states))

    def _parts(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Group tensors by dtype: a record has one."""
        parts: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            parts.setdefault(tensor.dtype, []).append(tensor)
        return list(parts.values())

    def _section(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the CPU as a section `[L, H, T, D]`; T is 1, but for KV of an encoder's output."""
        flat = tensor.detach().cpu()
        return flat.reshape(1, -1, 1, flat.shape[-1] if flat.dim() else 1) if self._spec.states else flat

    def _unite(self, parts: Sequence[list[Tensor]]) -> list[Tensor]:
        """Return the tensors of all records in the order of the spec, in its shapes; one record alone as it is."""
        by_dtype = {part[0].dtype: iter(part) for part in parts}
        specs = [(getattr(torch, spec.dtype), spec.shape) for spec in self._spec.states]
        if not specs:
            return [tensor for part in parts for tensor in part]
        try:
            return [next(by_dtype[dtype]).reshape(shape) for dtype, shape in specs]
        except (KeyError, StopIteration, RuntimeError) as error:
            raise CorruptionError(f"a stored layer state does not have the model's shapes: {error}") from error


def _release_when_saved(state: LayerState) -> None:
    """Let the device forget a state that the disk has; whoever needs it loads it."""
    if state.failure is None and all(stored.done() for stored in state.stored):
        state.tensors = state.storage = None
