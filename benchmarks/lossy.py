"""What lossy codecs save, and what they do to a model's next tokens.

    python benchmarks/lossy.py [--json]

SmolLM2-135M over code, prose and JSON that Python itself brings along. A prefix is computed and its KV, in bfloat16,
packed into records of 64 tokens and unpacked; then the model reads the text's next tokens once over the exact KV and
once over what came back. KL is that of the two distributions of the next token, averaged over those tokens. The model
runs in float32: bfloat16 alone would make a KL of 1e-3. The first block stays exact, as in a lossy tier; with
--with-first it is coded as well. The ratio is that of all records.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))

from codec import read_texts

from agentmem.ids import BlockHash, Fingerprint
from agentmem.kv.record import pack, unpack
from agentmem.levels import LOSSY_CODECS
from agentmem.testing.models import smollm2

BLOCK_SIZE = 64
NUM_PREFIX = 1024
NUM_NEXT = 256

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer: `[1, H, T, D]`."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one codec did to one text."""

    text: str
    codec: str
    ratio: float
    mean_kl: float
    max_kl: float
    top1: float


def main() -> None:
    """Measure every text with every codec, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--with-first", action="store_true", help="code the first block as well")
    options = parser.parse_args()
    model, tokenizer = smollm2(Path(__file__).parents[1] / ".models")
    model.float()
    rows: list[Row] = []
    for name, text in read_texts().items():
        ids = tokenizer(text[:40_000], return_tensors="pt").input_ids[:, : NUM_PREFIX + NUM_NEXT]
        rows += measure(name, ids, model, num_exact=0 if options.with_first else BLOCK_SIZE)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{'text':8} {'codec':9} {'ratio':>6} {'mean KL':>9} {'max KL':>9} {'top-1':>7}")
    for row in rows:
        print(f"{row.text:8} {row.codec:9} {row.ratio:6.2f} {row.mean_kl:9.1e} {row.max_kl:9.1e} {row.top1:7.1%}")


@torch.no_grad()
def measure(text: str, ids: Tensor, model: PreTrainedModel, *, num_exact: int) -> list[Row]:
    """Compare the model's next tokens over what each codec gives back with those over the exact KV."""
    cache = model(ids[:, :NUM_PREFIX], use_cache=True, logits_to_keep=1).past_key_values
    exact = [(layer.keys.bfloat16(), layer.values.bfloat16()) for layer in cache.layers]
    wanted = next_logprobs(model, ids, exact)
    rows = []
    for codec in ("lossless", *LOSSY_CODECS):
        restored, ratio = through(exact, codec, num_exact)
        found = next_logprobs(model, ids, restored)
        kl = (wanted.exp() * (wanted - found)).sum(-1)
        top1 = (wanted.argmax(-1) == found.argmax(-1)).float().mean()
        rows.append(Row(text, codec, ratio, float(kl.mean()), float(kl.max()), float(top1)))
    return rows


def through(layers: Layers, codec: str, num_exact: int) -> tuple[Layers, float]:
    """Pack and unpack KV, the first `num_exact` tokens losslessly; return what came back, and the ratio."""
    sections = [torch.cat([layer[index] for layer in layers]) for index in (0, 1)]
    back = [torch.empty_like(section) for section in sections]
    stored_nbytes = 0
    for start in range(0, NUM_PREFIX, BLOCK_SIZE):
        block = [section[:, :, start : start + BLOCK_SIZE] for section in sections]
        names = {"block_hash": BlockHash(bytes(32)), "fingerprint": Fingerprint(bytes(32))}
        record = pack(block, start=start, codec="lossless" if start < num_exact else codec, **names)
        stored_nbytes += len(record.data)
        unpack(record.data, [section[:, :, start : start + BLOCK_SIZE] for section in back])
    raw_nbytes = sum(section.nbytes for section in sections)
    return list(zip(back[0][:, None], back[1][:, None], strict=True)), raw_nbytes / stored_nbytes


def next_logprobs(model: PreTrainedModel, ids: Tensor, layers: Layers) -> Tensor:
    """Return the log-probabilities `[NUM_NEXT, V]` of what comes after each of the text's next tokens."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys.float(), values.float(), index)
    logits = model(ids[:, NUM_PREFIX:], past_key_values=cache).logits[0]
    return logits.double().log_softmax(-1)


if __name__ == "__main__":
    main()
