"""Abort safety: verbs are interrupted, as by Ctrl-C, at the places where Python lets signals in.

Whatever was interrupted: every branch is as it was or as the whole verb leaves it, its KV is what the model computes of
its tokens, nothing stays locked or pinned, the same verb works when it is done again, and the store checks clean.

AGENTMEM_INTERRUPTS says at how many places, chosen at random, each verb is interrupted; "all" takes every place, when
it is passed first and last. Without it, only the places that tests name are: `make torture` sets it.
"""

import dataclasses
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import agentmem
from agentmem._future import Future
from agentmem.check import check
from agentmem.marks import MarkKind
from agentmem.testing.interrupts import chosen, interrupt, places_of
from agentmem.tiers.crew import Crew
from agentmem.tiers.disk import DiskTier

pytestmark = pytest.mark.usefixtures("one_thread")

MOST = os.environ.get("AGENTMEM_INTERRUPTS", "")
at_random = pytest.mark.skipif(not MOST, reason="places are chosen at random: make torture, or AGENTMEM_INTERRUPTS=8")
BLOCK, CHUNK = 16, 32
TRUNK, OPEN = 75, 20
TOLERANCE = 5e-4
CONFIG: dict[str, Any] = {"block_size": BLOCK, "prefill_chunk_tokens": CHUNK}
TIGHT = 420
"""Tokens that a tight device holds: not all branches of a scene."""

Tokens = list[int]
After = dict[str, Tokens | None]


def places(count: int) -> list[int] | None:
    return None if MOST == "all" else int(MOST)


@dataclass
class Scene:
    """A store with one session: a trunk, and a branch to work on, made anew for each interrupt."""

    model: Any
    store: agentmem.Store
    session: agentmem.Session
    number: int = 0

    def tokens(self, count: int) -> Tokens:
        return random.Random(self.number * 1000 + count).choices(range(1, 256), k=count)

    @property
    def name(self) -> str:
        return f"work-{self.number}"

    @property
    def work(self) -> agentmem.Branch:
        return self.session.branch(self.name)

    def renew(self, *, num_pending: int = OPEN, is_cold: bool = False) -> None:
        """Make a branch with tokens after its tip, on the device or off it."""
        self.session.switch("main")
        for name in self.session.branches:
            if name != "main":
                self.session.drop(name)
        self.number += 1
        self.session.fork(self.name, at="main")
        self.session.forward(self.tokens(OPEN), branch=self.name)
        if num_pending:
            self.session.append(self.tokens(num_pending), branch=self.name)
        if is_cold:
            self.session.checkpoint(branch=self.name)
            self.cool()

    def cool(self) -> None:
        self.store.flush()
        for name in self.session.branches:
            self.session.evict(name)

    def branches(self) -> dict[str, Tokens]:
        return {name: self.session.branch(name).tokens for name in self.session.branches}

    def logits(self, tokens: Tokens) -> torch.Tensor:
        """What the model says by itself."""
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([tokens])).logits[0, -1]

    def continued(self, tokens: Tokens, count: int) -> Tokens:
        for _ in range(count):
            tokens = [*tokens, int(self.logits(tokens).argmax())]
        return tokens


@dataclass(frozen=True)
class Verb:
    """Something to interrupt.

    Attributes:
        do: The verb, on the branch that the scene has renewed.
        after: What it makes of branches; None for one that it drops. May be given a twin of the branch to try it on.
        renew: How the branch is made before.
        scenes: In which scenes it is done.
    """

    do: Callable[[Scene], object]
    after: Callable[[Scene, Tokens], After] = lambda _scene, _tokens: {}
    renew: dict[str, Any] = field(default_factory=dict)
    scenes: tuple[str, ...] = ("plain",)


def longer(count: int) -> Callable[[Scene, Tokens], After]:
    return lambda scene, tokens: {scene.name: [*tokens, *scene.tokens(count)]}


def as_new(tokens_of: Callable[[Tokens], Tokens]) -> Callable[[Scene, Tokens], After]:
    return lambda _scene, tokens: {"new": tokens_of(tokens)}


def batch_forward(scene: Scene) -> None:
    with scene.session.batch([scene.name, "main"]) as batch:
        batch.forward({scene.name: scene.tokens(40), "main": []})


def batch_generate(scene: Scene) -> None:
    with scene.session.batch([scene.name, "main"]) as batch:
        batch.generate([scene.name], max_new_tokens=3, do_sample=False)


def batch_fork(scene: Scene) -> None:
    with scene.session.batch([scene.name]) as batch:
        batch.fork(scene.name, ["left", "right"])
        batch.forward({"left": scene.tokens(2), "right": scene.tokens(3)})


def batch_score(scene: Scene) -> None:
    with scene.session.batch([scene.name, "main"]) as batch:
        batch.score({scene.name: [scene.tokens(3), scene.tokens(5)], "main": scene.tokens(4)})


def loop(scene: Scene) -> None:
    with scene.work.cache() as cache:
        ids = scene.work.pending
        for _ in range(3):
            with torch.no_grad():
                logits = scene.model(input_ids=torch.tensor([ids]), past_key_values=cache).logits[0, -1]
            ids = [int(logits.argmax())]


MAIN = ("plain", "tight", "states")

VERBS = {
    "append": Verb(lambda scene: scene.work.append(scene.tokens(30)), longer(30), scenes=("plain", "states")),
    "forward": Verb(lambda scene: scene.work.forward(scene.tokens(70)), longer(70), scenes=MAIN),
    "forward what is pending": Verb(lambda scene: scene.work.forward(), renew={"num_pending": 70}),
    "forward again": Verb(lambda scene: scene.work.forward(), renew={"num_pending": 0}, scenes=("plain", "states")),
    "forward a cold branch": Verb(
        lambda scene: scene.work.forward(scene.tokens(3)), longer(3), {"is_cold": True}, MAIN
    ),
    "generate": Verb(
        lambda scene: scene.work.generate(max_new_tokens=4, do_sample=False),
        lambda scene, tokens: {scene.name: scene.continued(tokens, 4)},
        scenes=MAIN,
    ),
    "checkpoint": Verb(lambda scene: scene.work.checkpoint("named"), scenes=MAIN),
    "rewind": Verb(
        lambda scene: scene.work.rewind(tokens=OPEN + 3),
        lambda scene, tokens: {scene.name: tokens[: -OPEN - 3]},
        {"num_pending": 0},
        ("plain", "states"),
    ),
    "fork": Verb(lambda scene: scene.session.fork("new", branch=scene.name), as_new(lambda tokens: tokens)),
    "fork a checkpoint": Verb(
        lambda scene: scene.session.fork("new", at=scene.name), as_new(lambda tokens: tokens), {"is_cold": True}
    ),
    "drop": Verb(lambda scene: scene.session.drop(scene.name), lambda scene, _tokens: {scene.name: None}),
    "switch": Verb(lambda scene: scene.session.switch(scene.name), renew={"is_cold": True}, scenes=MAIN),
    "flush": Verb(lambda scene: scene.store.flush()),
    "edit by splicing": Verb(
        lambda scene: scene.work.edit("new", 30, 40), as_new(lambda tokens: tokens[:30] + tokens[40:])
    ),
    "edit a cold branch exactly": Verb(
        lambda scene: scene.work.edit("new", 30, 40, mode="exact"),
        as_new(lambda tokens: tokens[:30] + tokens[40:]),
        {"is_cold": True},
    ),
    "feed a batch": Verb(batch_forward, longer(40), scenes=MAIN),
    "generate in a batch": Verb(
        batch_generate, lambda scene, tokens: {scene.name: scene.continued(tokens, 3)}, scenes=("plain", "states")
    ),
    "fork in a batch": Verb(
        batch_fork,
        lambda scene, tokens: {"left": [*tokens, *scene.tokens(2)], "right": [*tokens, *scene.tokens(3)]},
    ),
    "score in a batch": Verb(batch_score),
}


@pytest.fixture
def open_scene(tiny: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[[str], Scene]]:
    """Open a scene: "plain", "tight" (a device that does not hold all branches), "states" (a model with states)."""
    stores: list[agentmem.Store] = []

    def open_it(kind: str) -> Scene:
        model = tiny("lfm2" if kind == "states" else "llama", seed=5)
        config = agentmem.Config(**CONFIG)
        if kind == "tight":
            with agentmem.open(tmp_path / "store", model=model, config=config) as store:
                budget = TIGHT * store.token_nbytes
            config = dataclasses.replace(config, device_budget_nbytes=budget, host_budget_nbytes=budget // 4)
        stores.append(agentmem.open(tmp_path / "store", model=model, config=config))
        session = stores[0].create("scene")
        session.append(random.Random(0).choices(range(1, 256), k=TRUNK))
        session.checkpoint("trunk")
        return Scene(model, stores[0], session)

    yield open_it
    for store in stores:
        store.resume("scene").close()
        gc.collect()  # frameworks make cycles
        assert store.stats()["device_nbytes"] == 0
        store.close()
    assert_sound(tmp_path / "store")


# -- what is looked at


def assert_sound(path: Path) -> None:
    with agentmem.open(path) as view:
        assert check(view.environment, DiskTier(view.environment), read_data=True).problems == ()


def can_lock(session: agentmem.Session) -> bool:
    if not session._lock.acquire(timeout=2):
        return False
    session._lock.release()
    return True


def assert_free(session: agentmem.Session) -> None:
    """Nothing is in use, and another thread may work."""
    assert not session.is_in_use
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(can_lock(session)))
    thread.start()
    thread.join()
    assert got == [True], "the session is locked"
    assert session._workers == {}


def state_of(model: Any) -> tuple[Any, ...]:
    """What a verb may change on a model, for as long as it runs."""
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    return model.config._attn_implementation, hooks, torch.is_grad_enabled(), torch.random.initial_seed()


def assert_whole(scene: Scene, branch: agentmem.Branch) -> None:
    """The branch stands on its tip, and its KV is what the model computes of its tokens."""
    tokens, tip, state = branch.tokens, branch.tip, branch._entry.state
    assert tip is None or tip.num_tokens <= len(tokens)
    assert state.num_computed <= state.num_kv <= len(tokens)
    if any(mark.kind is MarkKind.SPLICE for mark in state.marks):
        return  # moved KV is not what the model computes
    logits = branch.forward()[-1]
    assert branch.tokens == tokens
    assert len(branch._entry.state.blocks) == len(tokens) // BLOCK
    assert float((logits - scene.logits(tokens)).abs().max()) < TOLERANCE


def assert_all_whole(scene: Scene) -> None:
    for name in scene.session.branches:
        assert_whole(scene, scene.session.branch(name))


def interrupted(scene: Scene, verb: Verb, at: int) -> bool:
    """Interrupt a verb, look at what is left, and do it again; return False when it was done before."""
    scene.renew(**verb.renew)
    before, model = scene.branches(), state_of(scene.model)
    after = verb.after(scene, before[scene.name])
    place = interrupt(lambda: verb.do(scene), at, KeyboardInterrupt())
    if place is None:
        return False
    try:
        found = scene.branches()
        assert_free(scene.session)
        assert state_of(scene.model) == model
        for name in before.keys() | found.keys() | after.keys():
            allowed = (before.get(name), after.get(name, before.get(name)), *forks_of(after, before, name))
            assert found.get(name) in allowed, name
        assert_all_whole(scene)
        if {name: found.get(name) for name in after} != after or not after:
            for name in found.keys() & after.keys() - before.keys():
                scene.session.drop(name)
            verb.do(scene)
        assert {name: scene.branches().get(name) for name in after} == after
        assert_all_whole(scene)
    except BaseException as error:
        error.add_note(f"interrupted at place {at}, {place.line}")
        raise
    return True


def forks_of(after: After, before: dict[str, Tokens], name: str) -> list[Tokens]:
    """What a branch may hold that a batch has made, and not fed yet."""
    return list(before.values()) if name in after and name not in before else []


@at_random
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, verb in VERBS.items() for kind in verb.scenes])
def test_a_verb_that_is_interrupted_leaves_everything_whole(
    open_scene: Callable[[str], Scene], name: str, kind: str
) -> None:
    verb, scene = VERBS[name], open_scene(kind)
    for _ in range(2):  # a model proves what it can do when it is first asked for: not that is interrupted
        scene.renew(**verb.renew)
        passed = places_of(lambda: verb.do(scene))

    struck = [interrupted(scene, verb, at) for at in chosen(passed, places(len(passed)))]

    assert any(struck)  # not all: how many places a wait passes depends on the other threads


# -- chats


@pytest.fixture
def chat(tiny_chat: tuple[Any, Any], tmp_path: Path) -> Iterator[Scene]:
    model, tokenizer = tiny_chat
    with agentmem.open(tmp_path / "store", model=model, tokenizer=tokenizer, config=agentmem.Config(**CONFIG)) as store:
        session = store.create("chat")
        session.send([user("What is wrong with the first test?"), {"role": "assistant", "content": "Nothing."}])
        yield Scene(model, store, session)
    assert_sound(tmp_path / "store")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answered(branch: agentmem.Branch) -> None:
    branch.chat(user("And with the second one?"), max_new_tokens=3, do_sample=False)


def rewritten(branch: agentmem.Branch) -> None:
    branch.send([user("What is wrong with the FIRST test?"), {"role": "assistant", "content": "Nothing."}])


@at_random
@pytest.mark.parametrize("do", [answered, rewritten])
def test_a_chat_that_is_interrupted_leaves_the_branch_and_its_messages_as_they_were(
    chat: Scene, do: Callable[[agentmem.Branch], None]
) -> None:
    session = chat.session
    session.fork("twin")
    do(session.branch("twin"))
    after = {name: session.branch(name).tokens for name in session.branches if name.startswith("twin")}
    messages = session.active.messages
    passed = places_of(lambda: do(session.fork("first", branch="main")))
    struck = 0

    for at in chosen(passed, places(len(passed))):
        work = session.fork(f"work-{at}", branch="main")
        before = set(session.branches)
        if interrupt(lambda work=work: do(work), at, KeyboardInterrupt()) is None:
            continue
        struck += 1
        assert_free(session)
        made = set(session.branches) - before
        if work.tokens == after["twin"]:
            assert [session.branch(name).tokens for name in made] == [after[name] for name in after if name != "twin"]
        else:
            assert (work.tokens, work.messages, made) == (session.active.tokens, messages, set())
            do(work)
        assert work.tokens == after["twin"]
        assert_whole(chat, work)
    assert struck


# -- sessions and stores


@at_random
def test_a_session_whose_closing_is_interrupted_can_be_resumed_with_all_its_tokens(
    open_scene: Callable[[str], Scene],
) -> None:
    scene = open_scene("plain")
    scene.renew()
    passed = places_of(scene.session.close)

    for at in chosen(passed, places(len(passed))):
        scene.session = scene.store.resume("scene")
        scene.renew()
        before = scene.branches()
        interrupt(scene.session.close, at, KeyboardInterrupt())
        assert_free(scene.session)
        scene.session = scene.store.resume("scene")
        assert scene.branches() == before
        assert_all_whole(scene)


@at_random
def test_a_resume_that_is_interrupted_can_be_done_again(open_scene: Callable[[str], Scene]) -> None:
    scene = open_scene("plain")
    scene.renew()
    before = scene.branches()
    scene.session.close()
    passed = places_of(lambda: scene.store.resume("scene"))

    for at in chosen(passed, places(len(passed))):
        scene.store.resume("scene").close()
        interrupt(lambda: scene.store.resume("scene"), at, KeyboardInterrupt())
        scene.session = scene.store.resume("scene")
        assert_free(scene.session)
        assert scene.branches() == before
        assert_all_whole(scene)


@at_random
def test_a_store_whose_opening_is_interrupted_while_the_model_is_read_can_be_opened_again(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    model, path = tiny("llama", seed=5), tmp_path / "store"
    before = state_of(model)

    def open_and_close() -> None:
        agentmem.open(path, model=model).close()

    passed = places_of(open_and_close)
    opening = next(index for index, place in enumerate(passed) if "_lmdb" in place.code.co_filename)
    for at in chosen(passed[:opening], places(opening)):
        interrupt(open_and_close, at, KeyboardInterrupt())
        gc.collect()
        with agentmem.open(path, model=model) as store:
            store.create(f"session-{at}").append([1, 2, 3])
        assert state_of(model) == before

    assert_sound(path)


@pytest.mark.parametrize("is_appended", [False, True])
def test_what_a_cancelled_prefill_computed_is_kept_in_whole_blocks(
    open_scene: Callable[[str], Scene], is_appended: bool
) -> None:
    scene = open_scene("plain")
    scene.renew(num_pending=0)
    prompt, before = scene.tokens(10 * CHUNK), scene.work.tokens
    if is_appended:
        scene.work.append(prompt)
    passes = 0

    def stop_at_the_sixth(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes == 6:
            raise KeyboardInterrupt

    hook = scene.model.register_forward_pre_hook(stop_at_the_sixth)
    with pytest.raises(KeyboardInterrupt):
        scene.work.forward() if is_appended else scene.work.forward(prompt)
    hook.remove()
    if not is_appended:
        assert scene.work.tokens == before
        scene.work.append(prompt)
    scene.store.flush()

    scene.work.forward()

    num_reused = scene.work.report.num_reused
    assert num_reused - len(before) > 4 * CHUNK
    assert scene.work.report.num_computed == len(before) + len(prompt) - num_reused
    assert_whole(scene, scene.work)


def test_no_thread_works_any_more_when_a_caller_of_the_crew_was_interrupted() -> None:
    crew, is_left, is_late = Crew(2, "test"), threading.Event(), list[bool]()

    def write(_task: int) -> None:
        is_left.wait(0.1)
        is_late.append(is_left.is_set())

    places_before = len(places_of(lambda: crew.do(lambda _task: None, range(2))))
    for at in range(places_before):
        is_left.clear()
        interrupt(lambda: crew.do(write, range(6)), at, KeyboardInterrupt())
        is_left.set()
    done = crew.do(lambda task: task, range(3))
    crew.close()

    assert places_before > 10
    assert not any(is_late)
    assert done == [0, 1, 2]


def test_a_thread_that_is_interrupted_while_it_waits_does_not_stop_the_one_that_works() -> None:
    at = 0
    while True:
        future, error = Future[int](), KeyboardInterrupt()
        thread = threading.Timer(0.002, future.set_result, (7,))
        thread.start()
        place = interrupt(future.result, at, error)
        thread.join(5)
        assert not thread.is_alive()
        assert future.result() == 7
        if place is None:
            break
        at += 1

    assert at > 3
