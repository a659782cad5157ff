"""What articles say of the size of KV, beside what the published models give: which figures are right, and which off.

Every number of ours is reckoned from the configurations, none is written down.
"""

from collections.abc import Callable
from dataclasses import dataclass

from agentmem.planning.geometry import Geometry, read_geometry

_BF16 = "bf16"
_PARTS = {"latent": 1, "rotated": 2}
"""Bytes of the two parts of a latent in the mixed form that Kimi's figure fits: fp8, and bf16 for the rotated part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One figure of an article.

    Attributes:
        what: What it is of.
        said: What the article says.
        found: What the published model gives, in bytes.
        is_right: Whether the two agree.
        why: Where they differ, or what the figure depends on.
    """

    what: str
    said: str
    found: float
    is_right: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """A claim before it is checked: right when what is found lies between `low` and `high` bytes."""

    what: str
    said: str
    low: float
    high: float
    found: Callable[[], float]
    why: Callable[[], str]


def check_claims() -> list[Claim]:
    """Check every figure against the published configurations."""
    return [_check(figure) for figure in _FIGURES]


def _check(figure: _Figure) -> Claim:
    found = figure.found()
    is_right = figure.low <= found <= figure.high
    return Claim(what=figure.what, said=figure.said, found=found, is_right=is_right, why=figure.why())


def _kv(model: str, num_tokens: int, dtype: str = _BF16) -> float:
    return float(read_geometry(model).kv_nbytes(num_tokens, dtype))


def _kimi_mixed() -> float:
    """Return 100k tokens of Kimi with the latent in fp8 and the rotated part in bf16."""
    layers = read_geometry("kimi-k2.5").layers
    return 100_000.0 * sum(_PARTS["latent"] * layer.num_keys + _PARTS["rotated"] * layer.num_values for layer in layers)


def _formula(geometry: Geometry, num_tokens: int) -> float:
    """Return the article's formula with the heads of the queries, at one byte: it leaves out that K and V are two."""
    fields = geometry.fields
    heads = fields.need("num_attention_heads")
    return float(len(geometry.layers) * heads * (fields.need("hidden_size") // heads) * num_tokens)


def _why_405b() -> str:
    geometry = read_geometry("llama-3.1-405b")
    return (
        f"8 heads of K and V, not 128: {geometry.token_nbytes(_BF16):,.0f} B a token in bf16, "
        f"{geometry.kv_nbytes(10**6, 'fp8') / 1e12:.3f} TB in fp8. With the 128 query heads, 1 byte and one tensor, "
        f"the article's formula gives {_formula(geometry, 10**6) / 1e12:.2f} TB"
    )


def _why_70b() -> str:
    geometry = read_geometry("llama-3.3-70b")
    return (
        f"{geometry.token_nbytes(_BF16):,.0f} B a token in bf16; fp8 {_kv('llama-3.3-70b', 100_000, 'fp8') / 1e9:.1f} "
        f"GB, int4 {_kv('llama-3.3-70b', 100_000, 'int4') / 1e9:.1f} GB"
    )


def _why_formula() -> str:
    geometry = read_geometry("llama-3.3-70b")
    ratio = _formula(geometry, 1) * 2 / geometry.token_nbytes(_BF16)
    return (
        f"it leaves out that K and V are two tensors, and takes query heads where heads of K and V count: "
        f"at 2 bytes a value {ratio:.0f}x too much under GQA, and 2x too little where all heads keep KV"
    )


_FIGURES = (
    _Figure(
        what="the formula, for one token of Llama-3.3-70B in bf16",
        said="layers x heads x head dim x bytes, 1.31 MB",
        low=1.30e6,
        high=1.32e6,
        found=lambda: read_geometry("llama-3.3-70b").token_nbytes(_BF16),
        why=_why_formula,
    ),
    _Figure(
        what="Llama-3.3-70B, 100k tokens",
        said="tens of GB",
        low=1e10,
        high=1e11,
        found=lambda: _kv("llama-3.3-70b", 100_000),
        why=_why_70b,
    ),
    _Figure(
        what="Llama-3.1-405B, 1M tokens",
        said="more than 2 TB",
        low=2e12,
        high=float("inf"),
        found=lambda: _kv("llama-3.1-405b", 10**6),
        why=_why_405b,
    ),
    _Figure(
        what="24 users of Llama-3.1-405B with 1M tokens each",
        said="dozens of users: tens of TB",
        low=1e13,
        high=1e14,
        found=lambda: 24 * _kv("llama-3.1-405b", 10**6),
        why=lambda: f"60 users: {60 * _kv('llama-3.1-405b', 10**6) / 1e12:.0f} TB; right with the corrected figure too",
    ),
    _Figure(
        what="Kimi K2.5, 100k tokens in fp8",
        said="3.8 GB",
        low=3.5e9,
        high=3.95e9,
        found=lambda: _kv("kimi-k2.5", 100_000, "fp8"),
        why=lambda: f"with the rotated part in bf16: {_kimi_mixed() / 1e9:.2f} GB",
    ),
    _Figure(
        what="a company report of 65k tokens, Llama-3.1-8B",
        said="GBs, a movie",
        low=1e9,
        high=1e10,
        found=lambda: _kv("llama-3.1-8b", 65_000),
        why=lambda: f"Llama-3.3-70B: {_kv('llama-3.3-70b', 65_000) / 1e9:.1f} GB",
    ),
)
