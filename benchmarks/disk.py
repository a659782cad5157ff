"""Bytes on disk of 16 branches with 64 own tokens each on a prefix of 4,096 tokens, beside the raw KV of ONE branch.

    python benchmarks/disk.py

Counted are the live pages of the data file: records with their padding to whole pages, checkpoints, branches, indexes,
LMDB's own trees. The prefix is appended and kept as a user would, so its last token is fed by each branch. Raw bytes of
one branch: (4,096 + 64) tokens times the KV of a token in the model's dtype.
"""

from harness import MB, Options, Row, check, load_model, main, read_tokens

import agentmem
from agentmem.gc import compact
from agentmem.session import Session

NUM_PREFIX = 4096
NUM_OWN = 64
NUM_BRANCHES = 16
MAX_RATIO = 0.85


def run(options: Options) -> dict[str, object]:
    """Make the branches in a new store and count."""
    model, tokenizer = load_model(options)
    path = options.folder / "disk"
    with agentmem.open(path, model=model, tokenizer=tokenizer) as store:
        empty_nbytes = store.environment.nbytes - store.environment.free_nbytes
        session = store.create("search")
        make_branches(session, read_tokens(tokenizer, NUM_PREFIX + NUM_OWN * NUM_BRANCHES))
        one_branch = (NUM_PREFIX + NUM_OWN) * session.adapter.spec.token_nbytes
        store.flush()
        stats = store.stats()
        live_nbytes = store.environment.nbytes - store.environment.free_nbytes
        file_nbytes = store.environment.nbytes
    compact(path)
    rows = [
        row("raw KV of one branch", one_branch, one_branch),
        row(f"raw KV of {NUM_BRANCHES} branches, a file each", NUM_BRANCHES * one_branch, one_branch),
        row("records of all branches", stats["disk_stored_nbytes"], one_branch),
        row("live pages of the file", live_nbytes, one_branch),
        row("the file", file_nbytes, one_branch),
        row("the file after compact", (path / "data.mdb").stat().st_size, one_branch),
    ]
    return {
        "benchmark": "disk",
        "what": f"{NUM_BRANCHES} branches x {NUM_OWN} own tokens on a prefix of {NUM_PREFIX:,}",
        "rows": rows,
        "num_blocks": stats["disk_num_blocks"],
        "empty_store_nbytes": empty_nbytes,
        "checks": [check("live pages / raw KV of one branch", live_nbytes / one_branch, MAX_RATIO)],
    }


def make_branches(session: Session, tokens: list[int]) -> None:
    """Keep the prefix, then fork and feed each branch's own tokens and keep it."""
    session.append(tokens[:NUM_PREFIX])
    trunk = session.checkpoint("prefix")
    for number in range(NUM_BRANCHES):
        name = f"branch-{number}"
        first = NUM_PREFIX + number * NUM_OWN
        session.fork(name, at=trunk)
        session.append(tokens[first : first + NUM_OWN], branch=name)
        session.forward(branch=name)
        session.checkpoint(name, branch=name)


def row(what: str, nbytes: float, one_branch: int) -> Row:
    """Return one line of the table."""
    return {"what": what, "MB": nbytes / MB, "of one branch's raw KV": nbytes / one_branch}


if __name__ == "__main__":
    main(run)
