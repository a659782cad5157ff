"""The name of everything about a model that makes KV differ, and how it follows the model.

Every byte of every weight is read when a store is opened: a cached answer would miss a weight that was changed in
memory, and a wrong hit is the worst fault (docs/decisions/007-fingerprint-reads-every-weight.md). While the store is
open, only what may have changed is read again (docs/decisions/015-identity-follows-the-model.md).
"""

import hashlib
import threading
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from agentmem.adapters.transformers.content import canonical, content_digests
from agentmem.adapters.transformers.weights import Survey, Watch, Weight, address_of, survey, version_of
from agentmem.errors import InvalidInputError
from agentmem.ids import Fingerprint
from agentmem.kv.hashing import hash_fields
from agentmem.kv.spec import KVSpec

_TAG = b"agentmem/fingerprint/2"

BATCH_MARK = "+agentmem-"
"""What follows the attention's name in a model's configuration while a pass over several branches runs."""

_MEDIA = frozenset({"image", "video", "audio", "speech", "vision"})
"""What tokens stand for whose ids decide where a model puts something else than their embeddings."""

_NOT_IDENTITY = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"}
    | {"output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"}
    | {"chunk_size_feed_forward", "is_encoder_decoder"}
)
"""Fields of a transformers config that change no KV; what they say is read from the model itself where it matters."""


def model_fingerprint(model: PreTrainedModel, spec: KVSpec, num_threads: int) -> Fingerprint:
    """Return the model's name as it is now (see `ModelIdentity`)."""
    return ModelIdentity(model, spec, num_threads).fingerprint


@dataclass(frozen=True, slots=True)
class _Known:
    """A weight that was read.

    Attributes:
        tensors: What it was then, held so that no other tensor takes their place in memory.
        stamp: Their versions and addresses then, and the adapters that were merged into it.
        digest: Its content.
    """

    tensors: tuple[Tensor, ...]
    stamp: tuple[object, ...]
    digest: bytes


class ModelIdentity:
    """The fingerprint of a model, which may be given other adapters or weights meanwhile. Thread-safe.

    Covers the weights by content, buffers, geometry, positions, attention kind and the active adapters by content: not
    their names, and not the adapters that are loaded and do nothing.

    Attributes:
        fingerprint: The name, as of the last `look`.
    """

    def __init__(self, model: PreTrainedModel, spec: KVSpec, num_threads: int) -> None:
        """Read every weight once, at the speed of memory.

        Raises:
            UnsupportedModelError: Some weights cannot be read.
            InvalidInputError: The adapters are as a forward pass would change them.
        """
        self._model = model
        self._config = model.config.get_text_config(decoder=True)
        self._spec = spec
        self._num_threads = num_threads
        self._known: dict[str, _Known] = {}
        self._kept_as = _kept_as(model)
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        self._attention: str | None = None
        self.fingerprint = self._read()

    @property
    def has_adapters(self) -> bool:
        """Whether the model has adapters, at work or not, as of the last `look`."""
        return self._watch is None or self._watch.has_tuners

    def look(self) -> Fingerprint:
        """Return the model's name as it is now. Microseconds while nothing changed; else, reads what may have changed.

        Changes through torch and peft are seen: adapters added, switched, scaled, merged, deleted; weights replaced or
        written in place. Writes through `.data` are not: they are seen when the store is opened the next time.

        Raises:
            InvalidInputError: The model was converted or moved, or its adapters are as a pass would change them.
        """
        if self._is_quiet():
            return self.fingerprint
        with self._lock:
            if not self._is_quiet():
                self.fingerprint = self._read()
            return self.fingerprint

    def _is_quiet(self) -> bool:
        watch = self._watch
        return watch is not None and watch.is_quiet() and self._attention == _attention_of(self._config)

    def _check_not_converted(self) -> None:
        now = _kept_as(self._model)
        if now != self._kept_as:
            raise InvalidInputError(
                f"the model was opened as {self._kept_as} and is {now} now: KV of one cannot stand beside KV of the "
                f"other; close the store, and open it with the model as it is"
            )

    def _read(self) -> Fingerprint:
        """Read what may have changed. When that fails, everything may have: whoever mends it may write weights."""
        known, self._known, self._watch = self._known, {}, None
        self._check_not_converted()
        found = survey(self._model)
        watch, self._attention = Watch(found), _attention_of(self._config)  # before reading
        fields = (
            type(self._model).__name__.encode(),
            hash_fields(b"weights", self._weights(found, known)),
            b"".join(canonical(self._model.config.to_dict(), _is_no_identity)),  # of towers and encoders too
            str(self._attention).encode(),
            str(self._spec).encode(),
            *self._adapters(found),
        )
        self._watch = watch
        return Fingerprint(hash_fields(_TAG, fields))

    def _weights(self, found: Survey, known: dict[str, _Known]) -> list[bytes]:
        """Return the names and digests of the model's own weights; only those that may have changed are read."""
        stamps = {weight.name: _stamp(weight) for weight in found.own}  # first: a change while reading must show
        changed = [weight for weight in found.own if not _is_known(weight, stamps[weight.name], known)]
        digests = content_digests([weight.read() for weight in changed], self._num_threads)
        read = {
            weight.name: _Known(weight.tensors, stamps[weight.name], digest)
            for weight, digest in zip(changed, digests, strict=True)
        }
        self._known = {weight.name: read.get(weight.name) or known[weight.name] for weight in found.own}
        return [part for name, each in self._known.items() for part in (name.encode(), each.digest)]

    def _adapters(self, found: Survey) -> list[bytes]:
        """Return the names and digests of what the active adapters consist of; nothing when none is active."""
        digests = content_digests([value for _, value in found.adapters], self._num_threads)
        names = (name.encode() for name, _ in found.adapters)
        return [hash_fields(b"adapter", pair) for pair in zip(names, digests, strict=True)]


def tokenizer_hashes(tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, str]:
    """Return hex names of the tokenizer and of its chat template; "" for what there is not."""
    if tokenizer is None:
        return "", ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = canonical(dict(tokenizer.get_vocab())) if backend is None else (backend.to_str().encode(),)
    content = b"".join(vocabulary)
    template = getattr(tokenizer, "chat_template", None)
    template_hash = hashlib.blake2b(str(template).encode(), digest_size=16).hexdigest() if template else ""
    return hashlib.blake2b(content, digest_size=16).hexdigest(), template_hash


def _is_known(weight: Weight, stamp: tuple[object, ...], known: dict[str, _Known]) -> bool:
    """Say whether a weight was read and has not been touched since."""
    old = known.get(weight.name)
    return (
        old is not None
        and bool(weight.tensors)
        and old.stamp == stamp
        and all(before is now for before, now in zip(old.tensors, weight.tensors, strict=True))
    )


def _stamp(weight: Weight) -> tuple[object, ...]:
    """Return what changes when a weight's tensors are written to, or an adapter is merged into it."""
    return (weight.merged, *((version_of(tensor), address_of(tensor)) for tensor in weight.tensors))


def _attention_of(config: PreTrainedConfig) -> str | None:
    """Return the name of the attention that the model was given, whatever stands in for it right now."""
    name: str | None = config._attn_implementation  # noqa: SLF001 - there is no other way to read it
    return None if name is None else name.partition(BATCH_MARK)[0]


def _kept_as(model: PreTrainedModel) -> str:
    return f"{model.dtype} on {model.device}"


def _is_no_identity(key: str) -> bool:
    is_control = key.endswith("_token_id") and key.partition("_")[0] not in _MEDIA
    return is_control or key in _NOT_IDENTITY
