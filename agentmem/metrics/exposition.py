"""Prometheus' text: written from a store's numbers, and read again. The one home of prometheus-client."""

import math
from collections.abc import Callable, Iterator, Mapping

from agentmem.errors import InvalidInputError
from agentmem.metrics.families import PREFIX, samples

try:
    from prometheus_client import CollectorRegistry, Metric
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.parser import text_string_to_metric_families
except ImportError as error:
    raise InvalidInputError(
        "metrics need the package `prometheus-client`: pip install 'agentmem-kv[metrics]'"
    ) from error

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Numbers by name and labels."""


class Exposition:
    """The numbers of one store, for its own registry and no other."""

    def __init__(self, read: Callable[[], Mapping[str, float]], info: Mapping[str, str]) -> None:
        """Serve what `read` returns at each scrape; `info` says whose numbers they are."""
        self._read = read
        self._info = dict(info)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the numbers of this moment, and their content type, in the format that a scraper accepts."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield a family after the other, for the registry."""
        info = Metric(f"{PREFIX}store_info", "Whose numbers these are.", "gauge")
        info.add_sample(info.name, self._info, 1)
        families = {info.name: info}
        for sample in samples(self._read()):
            kind = "counter" if sample.is_counter else "gauge"
            family = families.setdefault(sample.family, Metric(sample.family, sample.help, kind))
            family.add_sample(sample.name, dict(sample.labels), sample.value)
        yield from families.values()


def parse(text: str) -> Samples:
    """Read what a store serves; numbers of others, and what is no number, are left out.

    Raises:
        InvalidInputError: It is not Prometheus' text.
    """
    try:
        return {
            (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(PREFIX) and math.isfinite(sample.value)
        }
    except (ValueError, KeyError, IndexError) as error:
        raise InvalidInputError(f"these are no metrics in Prometheus' text format: {error}") from error
