"""What history edits cost, and how near moved KV comes to computed KV: next-token loss on real text, and CPU time.

    python benchmarks/edits.py [--quick]

Texts are pieces of Python's language reference. A context of 1,023 tokens is edited; the loss is the mean over the
tokens that follow in the text. `truncate` leaves the last half, with and without four tokens of the beginning, against
computing that half again. `splice` cuts 256 tokens out of the middle, against computing again what follows. Fifty small
cuts in a row stand against one that cuts out the same; key errors are against one turn in fp64. CPU time is that of the
process until the KV is there.
"""

import statistics
from collections.abc import Callable

import torch
from harness import Options, Row, Times, check, load_model, main, read_tokens
from torch import Tensor

import agentmem
from agentmem.branch import Branch
from agentmem.session import Session
from agentmem.store import Store

NUM_CONTEXT, NUM_NEXT = 1023, 192
HALF = NUM_CONTEXT // 2
CUT = (512, 768)
SMALL_CUT, NUM_SMALL_CUTS = 5, 50
MAX_TRUNCATE_LOSS, MAX_SPLICE_LOSS, MIN_TIMES_CHEAPER = 0.01, 0.03, 20.0

EDITS: dict[str, Callable[[Session], Branch]] = {
    "not edited": lambda session: session.fork("as it is"),
    "last half, computed again": lambda session: computed(session, 0, NUM_CONTEXT - HALF),
    "last half, 4 sinks, moved": lambda session: session.truncate("window", keep_last=HALF),
    "last half, no sinks, moved": lambda session: session.truncate("bare", keep_last=HALF, sinks=0),
    "256 cut out, computed again": lambda session: computed(session, *CUT),
    "256 cut out, moved": lambda session: session.edit("cut", *CUT),
    "250 cut out, moved": lambda session: session.edit("once", CUT[0], CUT[0] + NUM_SMALL_CUTS * SMALL_CUT),
    "50 times 5 cut out, moved": lambda session: often(session),
}
AGAIN = {"last half": "last half, computed again", "256 cut out": "256 cut out, computed again"}


def run(options: Options) -> dict[str, object]:
    """Measure in both dtypes."""
    num_texts = options.repeats(full=4, quick=1)
    rows: list[Row] = []
    checks: list[Row] = []
    for dtype in (torch.bfloat16, torch.float32):
        model, tokenizer = load_model(options)
        name = str(dtype).removeprefix("torch.")
        tokens = read_tokens(tokenizer, num_texts * (NUM_CONTEXT + NUM_NEXT))
        config = agentmem.Config(save_in_background=False)
        with agentmem.open(options.folder / name, model=model.to(dtype), tokenizer=tokenizer, config=config) as store:
            measured = measure(store, tokens)
        rows += [{"dtype": name, **row} for row in measured]
        checks += claims(name, {str(row["branch"]): row for row in measured})
    return {
        "benchmark": "edits",
        "what": f"{NUM_CONTEXT:,} tokens edited, loss of the next {NUM_NEXT - 1}, mean of {num_texts} texts; CPU time",
        "rows": rows,
        "checks": checks,
    }


def measure(store: Store, tokens: list[int]) -> list[Row]:
    """Make every edit of every text; return a row for each edit."""
    losses: dict[str, list[float]] = {name: [] for name in EDITS}
    times = {name: Times() for name in EDITS}
    errors: dict[str, float] = {}
    proof = Times()
    with proof.run():
        store.create("proof").adapter.key_rotation()
    for first in range(0, len(tokens), NUM_CONTEXT + NUM_NEXT):
        session = store.create(f"text at {first}")
        session.forward(tokens[first : first + NUM_CONTEXT])
        for name, edit in EDITS.items():
            with times[name].run():
                branch = edit(session)
            losses[name].append(loss(branch, tokens[first + NUM_CONTEXT : first + NUM_CONTEXT + NUM_NEXT]))
        errors = key_errors(session)
        session.close()
    return [
        {"branch": "(proof, once for a model)", "cpu ms": proof.cpu * 1e3},
        *(row_of(name, losses, times, errors) for name in EDITS),
        {"branch": "50 turns of 5, one on top of the other", "key error": errors["turned again and again"]},
    ]


def row_of(name: str, losses: dict[str, list[float]], times: dict[str, Times], errors: dict[str, float]) -> Row:
    """Return one edit's means beside those of computing again."""
    again = AGAIN.get(name.partition(",")[0])
    row: Row = {"branch": name, "loss": statistics.mean(losses[name]), "cpu ms": times[name].cpu * 1e3}
    if again is not None:
        row["loss against computed"] = row["loss"] - statistics.mean(losses[again])
        row["times cheaper"] = times[again].cpu / times[name].cpu
    return {**row, **({"key error": errors[name]} if name in errors else {})}


def claims(dtype: str, rows: dict[str, Row]) -> list[Row]:
    """Return what must hold."""
    half, cut = rows["last half, 4 sinks, moved"], rows["256 cut out, moved"]
    once, often = rows["250 cut out, moved"], rows["50 times 5 cut out, moved"]
    return [
        check(f"{dtype}: loss of truncating, against computed", half["loss against computed"], MAX_TRUNCATE_LOSS),
        check(f"{dtype}: loss of cutting, against computed", cut["loss against computed"], MAX_SPLICE_LOSS),
        check(f"{dtype}: cutting, times cheaper", cut["times cheaper"], MIN_TIMES_CHEAPER, is_at_least=True),
        check(f"{dtype}: loss of 50 cuts, against one", often["loss"] - once["loss"], 1e-6),
        check(f"{dtype}: key error of 50 cuts, against one", often["key error"] / once["key error"], 1.0),
    ]


def computed(session: Session, start: int, end: int) -> Branch:
    """Cut tokens out and compute what follows."""
    branch = session.edit(f"exact {start}", start, end, mode="exact")
    branch.forward()
    return branch


def often(session: Session) -> Branch:
    """Cut a few tokens out, again and again, each time from the branch before."""
    branch = session.active
    for number in range(NUM_SMALL_CUTS):
        branch = branch.edit(f"cut {number}", CUT[0], CUT[0] + SMALL_CUT)
    return branch


def loss(branch: Branch, following: list[int]) -> float:
    """Return the mean next-token loss of what follows, but for its first token."""
    logits = branch.forward(following)
    branch.rewind(tokens=len(following))
    return float(torch.nn.functional.cross_entropy(logits[:-1].float(), torch.tensor(following[1:])))


def key_errors(session: Session) -> dict[str, float]:
    """Return how far moved keys are from the originals turned once in fp64, the largest element."""
    rotation, shift = session.adapter.key_rotation(), -NUM_SMALL_CUTS * SMALL_CUT
    originals = kv(session, "main", CUT[0] - shift)
    exact = [section.double() for section in originals]
    rotation.rotate(exact, shift)
    moved = {
        "250 cut out, moved": kv(session, "once", CUT[0]),
        "50 times 5 cut out, moved": kv(session, f"cut {NUM_SMALL_CUTS - 1}", CUT[0]),
        "turned again and again": originals,
    }
    for _ in range(NUM_SMALL_CUTS):
        rotation.rotate(originals, -SMALL_CUT)
    return {name: float((sections[0].double() - exact[0]).abs().max()) for name, sections in moved.items()}


def kv(session: Session, name: str, start: int) -> list[Tensor]:
    """Return a copy of the KV that a branch has from `start` on."""
    stop = session.switch(name).num_tokens
    return [section.clone() for section in session.ledger.workspace.slots(start, stop)]


if __name__ == "__main__":
    main(run)
