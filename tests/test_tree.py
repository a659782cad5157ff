"""The tree of checkpoints in memory, and its drawing."""

import itertools

import pytest

from agentmem.errors import CorruptionError, InvalidInputError, NotFoundError
from agentmem.ids import BlockDigest, BlockHash, CheckpointId, Fingerprint, SessionId
from agentmem.tree.checkpoint import BlockRef, BranchRecord, Checkpoint, check_name
from agentmem.tree.render import render
from agentmem.tree.tree import SessionTree

SESSION = SessionId(b"session1")
_numbers = itertools.count(1)


def checkpoint(parent=None, *, own=1, number=None, **fields):
    number = number or next(_numbers)
    fields.setdefault("checkpoint_id", CheckpointId(number.to_bytes(4, "big") + bytes(12)))
    return Checkpoint(
        session_id=SESSION,
        parent_id=parent and parent.checkpoint_id,
        num_tokens=(parent.num_tokens if parent else 0) + own,
        tokens=number.to_bytes(4, "little") * own,
        fingerprint=Fingerprint(bytes(32)),
        created_s=float(number),
        **fields,
    )


def branch(name, tip, **fields):
    return BranchRecord(name=name, tip=tip and tip.checkpoint_id, created_s=1.0, updated_s=1.0, **fields)


def block(number):
    return BlockRef(BlockHash(bytes([number]) * 32), BlockDigest(bytes([number + 100]) * 32))


def line(length):
    checkpoints = [checkpoint()]
    for _ in range(length - 1):
        checkpoints.append(checkpoint(checkpoints[-1]))
    return checkpoints


def test_checkpoints_in_any_order_form_one_tree():
    root = checkpoint()
    child = checkpoint(root)
    grandchild = checkpoint(child)

    tree = SessionTree([grandchild, root, child])

    assert tree.chain(grandchild.checkpoint_id) == [root, child, grandchild]
    assert tree.roots() == [root]
    assert tree.children(root.checkpoint_id) == [child]


def test_add_refuses_a_checkpoint_whose_parent_is_unknown():
    tree = SessionTree()

    with pytest.raises(NotFoundError):
        tree.add(checkpoint(checkpoint()))


def test_add_replaces_a_record_but_never_its_parent():
    root = checkpoint()
    child = checkpoint(root, number=900, has_kv=False)
    tree = SessionTree([root, child])
    with_kv = checkpoint(root, number=900)

    tree.add(with_kv)

    assert tree.get(child.checkpoint_id).has_kv
    assert len(tree) == 2
    with pytest.raises(InvalidInputError, match="another parent"):
        tree.add(checkpoint(number=900))


def test_children_of_a_lost_checkpoint_stand_as_roots():
    root = checkpoint()
    child = checkpoint(root)
    tree = SessionTree([root, child])

    tree.discard(root.checkpoint_id)

    assert tree.roots() == [child]
    assert root.checkpoint_id not in tree
    with pytest.raises(CorruptionError, match="check"):
        tree.tokens(child.checkpoint_id)


def test_a_ring_of_checkpoints_is_damage():
    one = checkpoint(number=1001)
    other = checkpoint(one, number=1002)
    one_again = checkpoint(other, number=1001)

    with pytest.raises(CorruptionError, match="their own ancestors"):
        SessionTree([one_again, other])


def test_tokens_are_those_of_all_ancestors_in_order():
    root = checkpoint(own=2, number=1)
    child = checkpoint(root, own=1, number=2)
    tree = SessionTree([root, child])

    assert tree.tokens(child.checkpoint_id) == b"\1\0\0\0\1\0\0\0\2\0\0\0"


def test_blocks_of_a_child_take_over_where_its_first_block_says():
    root = checkpoint(blocks=(block(0), block(1), block(2)))
    child = checkpoint(root, first_block=1, blocks=(block(11), block(12)))
    grandchild = checkpoint(child, first_block=3, blocks=(block(13),))
    tree = SessionTree([root, child, grandchild])

    assert tree.blocks(grandchild.checkpoint_id) == [block(0), block(11), block(12), block(13)]
    assert tree.blocks(root.checkpoint_id) == [block(0), block(1), block(2)]


def test_blocks_behind_a_gap_are_not_returned():
    root = checkpoint(has_kv=False)
    child = checkpoint(root, first_block=3, blocks=(block(3),))
    tree = SessionTree([root, child])

    assert tree.blocks(child.checkpoint_id) == []


def test_common_ancestor_is_the_newest_shared_checkpoint():
    root = checkpoint()
    trunk = checkpoint(root)
    left, right = checkpoint(trunk), checkpoint(trunk)
    stranger = checkpoint()
    tree = SessionTree([root, trunk, left, right, stranger])

    assert tree.common_ancestor(left.checkpoint_id, right.checkpoint_id) == trunk
    assert tree.common_ancestor(left.checkpoint_id, root.checkpoint_id) == root
    assert tree.common_ancestor(left.checkpoint_id, left.checkpoint_id) == left
    assert tree.common_ancestor(left.checkpoint_id, stranger.checkpoint_id) is None


def test_resolve_takes_branch_names_ids_and_unique_prefixes():
    one = checkpoint(checkpoint_id=CheckpointId(bytes.fromhex("aabbcc01") + bytes(12)))
    other = checkpoint(checkpoint_id=CheckpointId(bytes.fromhex("aabbcc02") + bytes(12)))
    tree = SessionTree([one, other])

    assert tree.resolve("patch-a", {"patch-a": other.checkpoint_id}) == other
    assert tree.resolve("AABBCC01", {}) == one
    assert tree.resolve(other.checkpoint_id.hex(), {}) == other


def test_resolve_lists_what_an_ambiguous_prefix_could_mean():
    one = checkpoint(checkpoint_id=CheckpointId(bytes.fromhex("aabbcc01") + bytes(12)))
    other = checkpoint(checkpoint_id=CheckpointId(bytes.fromhex("aabbcc02") + bytes(12)))

    with pytest.raises(InvalidInputError, match=r"ambiguous: aabbcc01.*aabbcc02"):
        SessionTree([one, other]).resolve("aabb", {})


def test_resolve_lists_what_is_near_when_nothing_is_called_so():
    tree = SessionTree([checkpoint(checkpoint_id=CheckpointId(bytes.fromhex("aabbcc01") + bytes(12)))])

    with pytest.raises(NotFoundError, match="did you mean patch-a"):
        tree.resolve("pach-a", {"patch-a": None, "other": None})
    with pytest.raises(NotFoundError, match="did you mean aabbcc01"):
        tree.resolve("aabbdd", {})
    with pytest.raises(NotFoundError, match="has no checkpoint yet"):
        tree.resolve("patch-a", {"patch-a": None})
    with pytest.raises(InvalidInputError, match="at least 4 hex digits"):
        tree.resolve("aa", {})


@pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "a\0b", "\x1b[31m", "x" * 256, "é" * 128])
def test_check_name_refuses_what_cannot_be_a_name(name):
    with pytest.raises(InvalidInputError, match="branch name"):
        check_name("branch", name)


@pytest.mark.parametrize("name", ["a", "patch-a", "two words", "日本語", "x" * 255])
def test_check_name_takes_printable_text(name):
    assert check_name("branch", name) == name


def test_render_draws_forks_branches_and_tokens():
    root = checkpoint(number=1, own=4096, message="plan written")
    left = checkpoint(root, number=2, own=64)
    right = checkpoint(root, number=3, own=10)
    leaf = checkpoint(right, number=4, own=2)
    gone = checkpoint(root, number=5)
    branches = [branch("patch-a", left), branch("patch-b", leaf, num_open=12), branch("new", None)]

    text = render(
        SessionTree([root, left, right, leaf, gone]),
        title="ticket-4711",
        branches=branches,
        active="patch-b",
        notes={"patch-a": "device   score=0.4"},
    )

    assert text.splitlines() == [
        "ticket-4711  5 checkpoints · 3 branches · 4,185 tokens",
        "● 00000001  plan written     4,096 own  4,096 total",
        "├─● 00000002 [patch-a]          64 own  4,160 total  device   score=0.4",
        "├─● 00000003                    10 own  4,106 total",
        "│ ● 00000004 [patch-b* +12]      2 own  4,108 total",
        "└─○ 00000005                     1 own  4,097 total",
        "◌ [new]",
    ]


def test_render_folds_automatic_checkpoints_where_nothing_happens():
    root = checkpoint(number=1, own=10)
    auto = checkpoint(root, number=2, own=5, is_auto=True)
    leaf = checkpoint(auto, number=3, own=1)
    tree = SessionTree([root, auto, leaf])

    folded = render(tree, title="s", branches=[branch("main", leaf)])
    whole = render(tree, title="s", branches=[branch("main", leaf)], fold=False)
    named = render(tree, title="s", branches=[branch("main", leaf), branch("other", auto)])

    assert [line.split()[1:4] for line in folded.splitlines()[1:]] == [
        ["00000001", "10", "own"],
        ["00000003", "[main]", "6"],
    ]
    assert "00000002" in whole
    assert "00000002 [other]" in named


def test_render_leaves_out_what_drop_saved_of_a_branch_until_it_is_asked_for():
    root = checkpoint(number=1, own=10)
    kept = checkpoint(root, number=2, own=5)
    dropped = checkpoint(root, number=3, own=7, is_auto=True)
    asked_for = checkpoint(root, number=4, own=3)
    tree = SessionTree([root, kept, dropped, asked_for])

    folded = render(tree, title="s", branches=[branch("main", kept)])
    whole = render(tree, title="s", branches=[branch("main", kept)], fold=False)

    assert "00000003" not in folded
    assert "○ 00000004" in folded
    assert "○ 00000003" in whole


def test_render_keeps_ten_thousand_checkpoints_in_one_column():
    checkpoints = line(10_000)

    text = render(SessionTree(checkpoints), title="s", branches=[branch("main", checkpoints[-1])])

    assert len(text.splitlines()) == 10_001
    assert all(line.startswith("● ") for line in text.splitlines()[1:])


def test_render_bounds_the_indentation_of_forks_inside_forks():
    trunk = line(300)
    twigs = [checkpoint(parent) for parent in trunk[:-1]]

    text = render(SessionTree([*trunk, *twigs]), title="s", branches=[branch("main", trunk[-1])])

    assert len(text.splitlines()) == 1 + len(trunk) + len(twigs)
    assert max(map(len, text.splitlines())) < 100


def test_render_hangs_several_roots_from_the_title():
    one, other = checkpoint(number=1), checkpoint(number=2)

    text = render(SessionTree([one, other]), title="s", branches=[])

    assert [line[:10] for line in text.splitlines()[1:]] == ["├─○ 000000", "└─○ 000000"]


def test_render_lets_no_control_character_of_a_message_through():
    root = checkpoint(message="red \x1b[31m\nnew line " + "long " * 20)

    text = render(SessionTree([root]), title="s\x1b[0m", branches=[])

    assert "\x1b" not in text
    assert len(text.splitlines()) == 2
    assert "…" in text
