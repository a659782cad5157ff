"""The numbers of a store under the names that Prometheus' conventions give them.

Knows no library: the names, kinds and helps of what is served, and which of `store.stats()` each is.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

PREFIX = "agentmem_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One number of a family.

    Attributes:
        family: Name of the family, without the "_total" that a counter's samples end in.
        help: What the family is, in a sentence.
        is_counter: It only grows while the store is open.
        labels: Which of the family's numbers it is.
        value: The number.
    """

    family: str
    help: str
    is_counter: bool
    labels: Mapping[str, str]
    value: float

    @property
    def name(self) -> str:
        """The sample's name as it is served."""
        return f"{self.family}_total" if self.is_counter else self.family


@dataclass(frozen=True, slots=True)
class _Rule:
    """How names of `store.stats()` become a family: what their pattern's groups find are the labels."""

    pattern: str
    family: str
    help: str
    is_counter: bool = False


_RULES = (
    _Rule(r"(?P<tier>device|host)_nbytes", "tier_bytes", "Bytes in use in a tier."),
    _Rule(r"(?P<tier>disk)_live_nbytes", "tier_bytes", "Bytes in use in a tier."),
    _Rule(r"(?P<tier>.+)_budget_nbytes", "tier_budget_bytes", "Most bytes that a tier may use."),
    _Rule(r"(?P<tier>.+)_num_blocks", "tier_blocks", "Blocks in a tier."),
    _Rule(r"(?P<tier>.+)_hit_rate", "tier_hit_ratio", "Part of the bytes looked for in a tier that it had."),
    _Rule(r"(?P<tier>.+)_nbytes_per_s", "tier_bytes_per_second", "Bytes of KV per second that a tier gave lately."),
    _Rule(r"prefill_tokens_per_s", "prefill_tokens_per_second", "Tokens per second of the model's prefill lately."),
    _Rule(r"disk_raw_nbytes", "disk_raw_bytes", "Bytes of KV on disk, before compression."),
    _Rule(r"disk_stored_nbytes", "disk_stored_bytes", "Bytes of KV on disk, as stored."),
    _Rule(r"file_nbytes", "file_bytes", "Size of the data file."),
    _Rule(
        r"ssd_written_nbytes_per_token_reused",
        "ssd_written_bytes_per_token_reused",
        "Bytes written to disk for each token whose KV was loaded.",
    ),
    _Rule(r"(?P<from>.+)_to_(?P<to>.+)_nbytes", "moved_bytes", "Bytes of KV moved between tiers.", is_counter=True),
    _Rule(r"tokens_far_(?P<way>.+)", "far_tokens", "Tokens whose KV was far away, by what was done.", is_counter=True),
    _Rule(r"tokens_(?P<what>lost)_(?P<reason>.+)", "tokens", "Tokens by what became of their KV.", is_counter=True),
    _Rule(
        r"tokens_(?P<what>fed|reused|restored|on_device)",
        "tokens",
        "Tokens by what became of their KV.",
        is_counter=True,
    ),
    _Rule(r"encodings_lost_(?P<reason>.+)", "encodings_lost", "Outputs of an encoder that are computed again.", True),
    _Rule(r"(?P<tier>.+)_failures", "tier_failures", "Times that a tier did not answer.", is_counter=True),
    _Rule(
        r"(?P<tier>.+)_blocks_damaged", "tier_damaged_blocks", "Blocks of a tier that were damaged.", is_counter=True
    ),
)
"""The first rule that fits a name says what it is; a name that none fits is a counter of its own."""


def samples(stats: Mapping[str, float]) -> Iterator[Sample]:
    """Yield every number of `store.stats()`, each once."""
    for name, value in stats.items():
        yield _sample(name, value)


def _sample(name: str, value: float) -> Sample:
    for rule in _RULES:
        found = re.fullmatch(rule.pattern, name)
        if found:
            return Sample(
                family=PREFIX + rule.family,
                help=rule.help,
                is_counter=rule.is_counter,
                labels=found.groupdict(),
                value=value,
            )
    words = re.sub(r"\W", "_", re.sub(r"_nbytes$", "_bytes", name), flags=re.ASCII)
    return Sample(
        family=PREFIX + words, help=f"The counter {name}; see docs/reasons.md.", is_counter=True, labels={}, value=value
    )
