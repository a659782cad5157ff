"""What may befall the files of a store at rest: bits, pages and whole files that are not what was written.

Every kind is a function of a directory and a random generator, and says what it did; the same seed does the same.
"""

import random
from collections.abc import Callable
from pathlib import Path

PAGE_NBYTES = 4096
DATA_FILE = "data.mdb"

# Of a page's header: two bytes of flags, of which these say that it is a branch, a leaf or a meta page of a tree; a
# page of payload has other bytes there most often.
_FLAGS_AT = 10
_STRUCTURE_FLAGS = 0x0B

Damage = Callable[[Path, random.Random], str]


def flip_bits(folder: Path, rng: random.Random) -> str:
    """Flip one to three bits of the data file, half of the time where its structure is."""
    data = _read(folder)
    places = [_place(data, rng) for _ in range(rng.randrange(1, 4))]
    for place in places:
        data[place] ^= 1 << rng.randrange(8)
    return _write(folder, data, f"bits at {places}")


def truncate(folder: Path, rng: random.Random) -> str:
    """Cut the data file off anywhere, or at the end of a page."""
    data = _read(folder)
    size = rng.randrange(len(data))
    size -= size % PAGE_NBYTES if rng.random() < 0.5 else 0
    return _write(folder, data[:size], f"cut at {size} of {len(data)}")


def zero_page(folder: Path, rng: random.Random) -> str:
    """Make one page zeros."""
    data = _read(folder)
    page = _page(data, rng)
    data[page : page + PAGE_NBYTES] = bytes(PAGE_NBYTES)
    return _write(folder, data, f"zeros at {page}")


def garble_page(folder: Path, rng: random.Random) -> str:
    """Make one page noise."""
    data = _read(folder)
    page = _page(data, rng)
    data[page : page + PAGE_NBYTES] = rng.randbytes(PAGE_NBYTES)
    return _write(folder, data, f"noise at {page}")


def swap_pages(folder: Path, rng: random.Random) -> str:
    """Exchange two pages, as a file system or a controller that mixes them up would."""
    data = _read(folder)
    one, other = _page(data, rng), _page(data, rng)
    data[one : one + PAGE_NBYTES], data[other : other + PAGE_NBYTES] = (
        data[other : other + PAGE_NBYTES],
        data[one : one + PAGE_NBYTES],
    )
    return _write(folder, data, f"pages {one} and {other} exchanged")


def copy_page(folder: Path, rng: random.Random) -> str:
    """Write one page over another."""
    data = _read(folder)
    one, other = _page(data, rng), _page(data, rng)
    data[other : other + PAGE_NBYTES] = data[one : one + PAGE_NBYTES]
    return _write(folder, data, f"page {one} over {other}")


def append_garbage(folder: Path, rng: random.Random) -> str:
    """Add noise at the end of the data file."""
    data = _read(folder)
    return _write(folder, data + rng.randbytes(rng.randrange(1, 20_000)), "noise at the end")


def garble_file(folder: Path, rng: random.Random) -> str:
    """Make one of the directory's files noise, or empty, or take it away: LMDB's lock file and our own too."""
    file = rng.choice(sorted(folder.iterdir()))
    how = rng.choice(["noise", "empty", "gone"])
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(rng.randbytes(file.stat().st_size or 100) if how == "noise" else b"")
    return f"{file.name}: {how}"


def put_foreign_file(folder: Path, rng: random.Random) -> str:
    """Put another program's file, or the first pages of this one alone, in the place of the data file."""
    data = _read(folder)
    name, foreign = rng.choice(
        [
            ("text", b"There was a store here.\n" * 1000),
            ("SQLite", b"SQLite format 3\x00" + rng.randbytes(8176)),
            ("the first pages", bytes(data[: 2 * PAGE_NBYTES])),
            ("the meta pages of an empty file", bytes(data[:PAGE_NBYTES]) * 2 + bytes(len(data) - 2 * PAGE_NBYTES)),
        ]
    )
    return _write(folder, bytearray(foreign), f"foreign file: {name}")


KINDS: dict[str, Damage] = {
    "flip": flip_bits,
    "truncate": truncate,
    "zero a page": zero_page,
    "garble a page": garble_page,
    "swap two pages": swap_pages,
    "copy a page": copy_page,
    "append": append_garbage,
    "garble a file": garble_file,
    "foreign file": put_foreign_file,
}
"""Every kind of damage by its name."""


def _read(folder: Path) -> bytearray:
    return bytearray((folder / DATA_FILE).read_bytes())


def _write(folder: Path, data: bytearray, what: str) -> str:
    (folder / DATA_FILE).write_bytes(data)
    return what


def _page(data: bytearray, rng: random.Random) -> int:
    """Return where a page starts, half of the time one of the file's structure."""
    pages = range(len(data) // PAGE_NBYTES)
    trees = [page for page in pages if data[page * PAGE_NBYTES + _FLAGS_AT] & _STRUCTURE_FLAGS]
    return rng.choice(trees if trees and rng.random() < 0.5 else pages) * PAGE_NBYTES


def _place(data: bytearray, rng: random.Random) -> int:
    return _page(data, rng) + rng.randrange(PAGE_NBYTES)
