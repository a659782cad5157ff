"""Names values by what they hold: weights in any layout, and the plain values of a configuration.

Knows nothing of models.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
import xxhash
from torch import Tensor

from agentmem.errors import UnsupportedModelError
from agentmem.kv.hashing import hash_fields
from agentmem.tiers.crew import Crew

_PIECE_NBYTES = 32 << 20
"""Weights are hashed in pieces of this size, so that threads share large ones evenly."""


def content_digests(values: Sequence[object], num_threads: int) -> list[bytes]:
    """Return 32 bytes for each value: a tensor, or tensors and plain values in tuples, lists and dicts.

    Every byte is read, at the speed of memory. Tensors on a GPU are copied to the host piece by piece.

    Raises:
        UnsupportedModelError: A tensor's bytes cannot be read: offloaded, sparse, or packed in a foreign object.
    """
    contents = [_Content(value) for value in values]
    pieces = [piece for content in contents for tensor in content.tensors for piece in _pieces(tensor)]
    with contextlib.closing(Crew(num_threads, "agentmem-hash")) as crew:
        sums = iter(crew.do(_sum, pieces))
    return [hash_fields(b"content", (*content.fields, *islice(sums, content.num_pieces))) for content in contents]


def canonical(value: object, is_ignored: Callable[[str], bool] | None = None) -> Iterator[bytes]:
    """Yield a plain value as bytes that do not depend on dict order or on how floats print.

    Args:
        value: Numbers, text, dtypes, and dicts, lists and sets of them.
        is_ignored: Says which keys of dicts, at any depth, are left out.
    """
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            if is_ignored is None or not is_ignored(str(key)):
                yield hash_fields(b"entry", (str(key).encode(), *canonical(value[key], is_ignored)))
    elif isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        yield hash_fields(b"list", (hash_fields(b"item", canonical(item, is_ignored)) for item in items))
    elif isinstance(value, float):
        yield b"float:" + value.hex().encode()
    elif value is None or isinstance(value, str | int | torch.dtype):
        yield type(value).__name__.encode() + b":" + str(value).encode()
    else:  # an object prints its address, which differs in every process
        yield type(value).__name__.encode()


class _Content:
    """A value taken apart.

    Attributes:
        fields: What is no tensor: names, shapes, dtypes, plain values.
        tensors: The plain tensors in it, in order.
    """

    def __init__(self, value: object) -> None:
        self.fields: list[bytes] = []
        self.tensors: list[Tensor] = []
        self._add(value)

    @property
    def num_pieces(self) -> int:
        """Pieces that its tensors are hashed in."""
        return sum(_num_pieces(tensor) for tensor in self.tensors)

    def _add(self, value: object) -> None:
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, Mapping):
            for key in sorted(value, key=str):
                self.fields.append(b"key:" + str(key).encode())
                self._add(value[key])
        elif isinstance(value, list | tuple):
            self.fields.append(b"items:" + str(len(value)).encode())
            for item in value:
                self._add(item)
        elif isinstance(value, torch.ScriptObject):
            raise UnsupportedModelError(
                "the model keeps weights in an object of TorchScript, whose bytes cannot be read: a changed weight "
                "would go unseen; quantise it with a method that keeps tensors"
            )
        else:
            self.fields.extend(canonical(value))

    def _add_tensor(self, tensor: Tensor) -> None:
        self.fields.append(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        if hasattr(tensor, "__tensor_flatten__"):  # one tensor to its users, several inside: torchao, quanto
            names, context = tensor.__tensor_flatten__()
            self.fields.append(type(tensor).__name__.encode())
            self._add({"context": context, **{f"inner.{name}": getattr(tensor, name) for name in names}})
        elif tensor.is_meta or tensor.layout is not torch.strided:
            where = "on the meta device (offloaded)" if tensor.is_meta else f"in the layout {tensor.layout}"
            raise UnsupportedModelError(
                f"a weight of shape {list(tensor.shape)} is {where}, where its bytes cannot be read: a changed weight "
                f"would go unseen; load the model whole onto one device"
            )
        elif tensor.is_quantized:
            self._add_quantised(tensor)
        else:
            self.tensors.append(tensor.detach())

    def _add_quantised(self, tensor: Tensor) -> None:
        self._add(tensor.int_repr())
        if tensor.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
            self._add((tensor.q_scale(), tensor.q_zero_point()))
        else:
            self._add((tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()))


def _pieces(tensor: Tensor) -> Iterable[Tensor]:
    """Cut a tensor into flat pieces, without copying a contiguous one."""
    return tensor.reshape(-1).split(_piece_length(tensor)) if tensor.numel() else ()


def _num_pieces(tensor: Tensor) -> int:
    return -(-tensor.numel() // _piece_length(tensor))


def _piece_length(tensor: Tensor) -> int:
    return max(1, _PIECE_NBYTES // max(1, tensor.element_size()))


def _sum(piece: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(piece.cpu().contiguous().view(torch.uint8).numpy().data)
