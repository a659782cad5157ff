"""The model inputs behind a branch's marks: images, audio, an encoder's text. They are kept as the tokens are.

Whatever KV is lost can be computed again from tokens and these inputs. Knows nothing of models or positions.
"""

import json
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from agentmem.errors import CorruptionError, InvalidInputError
from agentmem.ids import BlockDigest
from agentmem.kv import record as record_format
from agentmem.marks import Mark, MarkInput
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.host import HostTier
from agentmem.tiers.identity import Identity

_JSON = "json"


class MediaStore:
    """Model inputs by content, in RAM and on disk."""

    def __init__(self, identity: Identity, host: HostTier, disk: DiskTier) -> None:
        """Join the tiers."""
        self._identity = identity
        self._host = host
        self._disk = disk

    def save(self, digest: bytes, inputs: Mapping[str, object]) -> tuple[BlockDigest | None, tuple[MarkInput, ...]]:
        """Hand inputs to the disk's writer.

        Args:
            digest: Names their content.
            inputs: Tensors, and values that JSON can hold, by keyword.

        Returns:
            The name of their record (None when no input is a tensor), and what is in it.

        Raises:
            InvalidInputError: An input can be stored in neither way.
        """
        described = tuple(_describe(name, value) for name, value in inputs.items())
        sections = [_as_section(value) for value in inputs.values() if isinstance(value, Tensor)]
        if not sections:
            return None, described
        record = record_format.pack(
            sections,
            block_hash=self._identity.media_name(digest),
            fingerprint=self._identity.fingerprint,
            start=0,
        )
        self._disk.store([record])
        self._host.store(record.digest, sections)
        return record.digest, described

    def load(self, mark: Mark) -> dict[str, object]:
        """Return the inputs behind a mark, tensors on the CPU.

        Raises:
            NotFoundError: They are in no tier.
            CorruptionError: Their stored bytes are damaged.
        """
        sections = iter(self._sections(mark.payload) if mark.payload is not None else ())
        loaded: dict[str, object] = {}
        for described in mark.inputs:
            is_json = described.dtype == _JSON
            loaded[described.name] = json.loads(described.value) if is_json else _tensor(next(sections), described)
        return loaded

    def _sections(self, payload: BlockDigest) -> list[Tensor]:
        sections = self._host.fetch(payload)
        if sections is None:
            data = self._disk.load_record(payload)
            meta = record_format.read_meta(data)
            sections = [torch.empty(section.shape, dtype=torch.float64) for section in meta.sections]
            record_format.unpack(data, sections)
            self._host.store(payload, sections)
        return sections


def _describe(name: str, value: object) -> MarkInput:
    if isinstance(value, Tensor):
        return MarkInput(name=name, dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape))
    try:
        return MarkInput(name=name, dtype=_JSON, shape=(), value=json.dumps(value, sort_keys=True))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"the input {name!r} can't be stored ({error}): give a tensor or plain values"
        ) from error


def _as_section(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes as one section of 8-byte words, padded with zeros."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    padded = torch.zeros(max(1, math.ceil(data.numel() / 8)) * 8, dtype=torch.uint8)
    padded[: data.numel()] = data
    return padded.view(torch.float64).reshape(1, 1, 1, -1)


def _tensor(section: Tensor, described: MarkInput) -> Tensor:
    dtype = getattr(torch, described.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptionError(f"the stored input {described.name!r} has dtype {described.dtype!r}, which torch has not")
    nbytes = math.prod(described.shape) * dtype.itemsize
    data = section.reshape(-1).view(torch.uint8)
    if data.numel() < nbytes:
        raise CorruptionError(f"the stored input {described.name!r} has {data.numel():,} bytes, not {nbytes:,}")
    return data[:nbytes].view(dtype).reshape(described.shape)
