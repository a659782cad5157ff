"""Messages on a branch, over SmolLM2's chat template: what real clients do to their own prefix, and what is reused.

Most tests speak SmolLM2's tokens to a tiny random model, whose answers are scripted; those of sampled text and of EOS
run the real model.
"""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import agentmem
from agentmem import InvalidInputError, Reason
from agentmem.testing.script import Script

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-3
STOP = 2
"""SmolLM2's <|im_end|>."""

NEWLINE, TURN = 198, 1

STRIPPING = (
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's template, but that it drops the thinking of answers before the last user message, as Qwen3's does."""

SYSTEM = {"role": "system", "content": "You fix failing tests. Say what is wrong before you change anything."}


@pytest.fixture(scope="module")
def real(smollm2):
    """SmolLM2 in fp32, so that what is equal is so within a narrow tolerance, and its tokenizer."""
    model, tokenizer = smollm2
    return copy.deepcopy(model).float(), tokenizer


@pytest.fixture
def open_store(store_path, tiny_chat):
    """Open the test's store, by default with the tiny model, and close it in the end."""
    opened = []

    def open_it(model=None, template=None):
        tiny, tokenizer = tiny_chat
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template or tokenizer.chat_template
        opened.append(agentmem.open(store_path, model=tiny if model is None else model, tokenizer=tokenizer))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture
def session(open_store):
    """A new session over the tiny model."""
    return open_store().create("chat")


@pytest.fixture
def say(tokenizer):
    """Give the options that make a model answer a text, or ids, word for word."""

    def options(answer, *, stop=True):
        tokens = tokenizer.encode(answer) if isinstance(answer, str) else list(answer)
        tokens += [STOP] * stop
        return {
            "logits_processor": LogitsProcessorList([Script(tokens)]),
            "max_new_tokens": len(tokens),
            "eos_token_id": STOP,
        }

    return options


@pytest.fixture
def template_ids(tokenizer):
    """Give the ids that the template makes of a whole log."""

    def ids(messages, *, prompt=False):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return tokenizer.encode(text, add_special_tokens=False)

    return ids


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def cold_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1]


def prompt_of(num_tokens, template_ids):
    """Return a system and a user message that the template makes so many tokens of, with the answer's header."""
    words = 0
    while len(template_ids([SYSTEM, user("go" + " on" * words)], prompt=True)) < num_tokens:
        words += 1
    return [SYSTEM, user("go" + " on" * words)]


def thought_of(num_tokens, tokenizer):
    """Return an answer with thinking that is so many tokens, its stop token included."""
    words = 0
    while (
        len(tokenizer.encode(text := f"<think>\nfirst{' this' * words}\n</think>\n\nThe answer is 4.")) < num_tokens - 1
    ):
        words += 1
    return text


# -- one message after the other


def test_a_chat_is_what_the_template_makes_of_the_whole_log(session, say, template_ids):
    first = session.chat("What is 2+2?", **say("It is 4."))
    second = session.chat("And 3+3?", **say("It is 6."))
    session.send("Thank you.")

    assert (first.text, second.text) == ("It is 4.", "It is 6.")
    assert first.message == assistant("It is 4.")
    assert first.tokens[-1] == STOP
    assert session.active.messages == [
        user("What is 2+2?"),
        first.message,
        user("And 3+3?"),
        second.message,
        user("Thank you."),
    ]
    assert session.active.tokens == template_ids(session.active.messages)


def test_a_text_is_a_message_of_the_users(session, template_ids):
    session.send("What is 2+2?")
    session.fork("other")
    session.send(user("Sure?"))
    session.send("Sure?", branch="other")

    assert session.active.tokens == session.branch("other").tokens
    assert session.active.tokens == template_ids([user("What is 2+2?"), user("Sure?")])


def test_sending_computes_nothing_and_says_what_is_pending(session):
    report = session.send([SYSTEM, user("What is 2+2?")])

    assert (report.operation, report.num_computed, report.num_reused) == ("send", 0, 0)
    assert report.num_pending == report.num_tokens == session.active.num_pending
    assert report.difference is None
    assert session.report == report


def test_after_eos_the_next_turn_equals_a_cold_run_of_the_whole_log(open_store, real, template_ids):
    model, _ = real
    session = open_store(model).create("chat")
    first = session.chat([SYSTEM, user("Answer with one word: what is the capital of France?")], max_new_tokens=24)
    pending = session.active.pending
    second = session.chat("And of Italy?", max_new_tokens=1)

    branch = session.active
    log = [SYSTEM, user("Answer with one word: what is the capital of France?"), first.message, user("And of Italy?")]
    fed = template_ids(log, prompt=True)
    assert first.tokens[-1] == STOP
    assert pending == [STOP]
    assert branch.tokens[:-1] == fed
    assert branch.tokens[branch.tokens.index(STOP, len(template_ids(log[:2]))) :][:3] == [STOP, NEWLINE, TURN]
    assert second.report.num_computed == len(fed) - len(template_ids(log[:2], prompt=True)) - len(first.tokens) + 1
    torch.testing.assert_close(
        branch.forward()[-1], cold_logits(model, branch.tokens), atol=TOLERANCE, rtol=0, check_stride=False
    )


def test_an_answer_cut_short_is_closed_when_the_next_message_comes(session, say, template_ids):
    cut = session.chat("Count.", **say("One, two, thr", stop=False))
    ending = session.active.tokens[-1]
    session.send("Go on.")

    assert ending == cut.tokens[-1] != STOP
    assert cut.report.num_pending == 1
    assert session.active.tokens == template_ids([user("Count."), assistant("One, two, thr"), user("Go on.")])
    assert session.active.tokens.count(STOP) == 4


def test_a_stop_token_that_the_template_has_no_use_for_gives_way_to_the_templates(
    session, say, template_ids, tokenizer
):
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    options = say([*tokenizer.encode("It is 4."), end_of_text], stop=False)
    reply = session.chat("What is 2+2?", **{**options, "eos_token_id": [STOP, end_of_text]})
    session.send("And 3+3?")

    assert (reply.text, reply.tokens[-1]) == ("It is 4.", end_of_text)
    assert session.active.tokens == template_ids([user("What is 2+2?"), assistant("It is 4."), user("And 3+3?")])


def test_what_was_sent_can_be_answered_later(session, say, template_ids):
    session.send([SYSTEM, user("What is 2+2?")])
    reply = session.chat(**say("It is 4."))

    assert reply.message == assistant("It is 4.")
    assert session.active.tokens[:-1] == template_ids([SYSTEM, user("What is 2+2?")], prompt=True) + list(
        reply.tokens[:-1]
    )


def test_a_message_behind_free_text_does_not_bring_the_templates_beginning(session, template_ids):
    session.append("Once upon a time")
    before = session.active.tokens
    session.send("Go on.")

    assert session.active.tokens == before + template_ids([SYSTEM, user("Go on.")])[len(template_ids([SYSTEM])) :]
    assert session.active.messages == [user("Go on.")]


def test_a_branch_keeps_its_messages_when_it_is_forked_and_rewound(session, say):
    session.chat("What is 2+2?", **say("It is 4."))
    point = session.checkpoint("one answer")
    session.chat("And 3+3?", **say("It is 6."))
    session.fork("other", at=point)
    session.rewind(tokens=4)

    assert session.branch("other").messages == [user("What is 2+2?"), assistant("It is 4.")]
    assert session.active.messages == [
        user("What is 2+2?"),
        assistant("It is 4."),
        user("And 3+3?"),
        assistant("It is"),
    ]


def test_messages_are_forgotten_whose_tokens_were_replaced(session, say):
    session.chat("What is 2+2?", **say("It is 4."))
    session.send("And 3+3?")
    session.rewind(tokens=6)
    session.append(" or rather something else altogether")

    assert session.active.messages == [user("What is 2+2?"), assistant("It is 4.")]


# -- a whole list


def test_a_list_that_goes_on_keeps_everything(session, say):
    messages = [SYSTEM, user("What is 2+2?")]
    reply = session.chat(messages, **say("It is 4."))
    before = session.active.tokens
    report = session.send([*messages, reply.message, user("And 3+3?")])

    assert report.difference is None
    assert session.active.tokens[: len(before)] == before
    assert session.branches == ["main"]


def test_24_sampled_turns_feed_no_generated_token_again(open_store, real):
    model, tokenizer = real
    store = open_store(model)
    session = store.create("chat")
    messages, lost = [SYSTEM], 0
    for turn in range(24):
        messages.append(user(f"Tell me something odd, number {turn}."))
        before = session.active.num_pending
        num_tokens = session.active.num_tokens
        reply = session.chat(messages, max_new_tokens=14, do_sample=True, temperature=1.0, top_k=0, seed=turn)
        messages.append(reply.message)
        text = tokenizer.decode(reply.tokens)
        lost += tokenizer.encode(text, add_special_tokens=False) != list(reply.tokens)

        assert reply.report.difference is None
        assert reply.report.num_reused == num_tokens - before
        assert reply.report.num_computed == session.active.num_tokens - 1 - reply.report.num_reused

    print(f"{lost} of 24 sampled turns do not survive decode + encode")
    assert lost > 0
    assert store.stats()["tokens_fed"] == session.active.num_tokens - 1
    assert session.active.messages == messages


def test_random_ids_are_kept_whatever_their_text_is(session):
    messages = [SYSTEM]
    for turn in range(8):
        messages.append(user(f"Turn {turn}."))
        reply = session.chat(messages, max_new_tokens=24, do_sample=True, seed=turn, eos_token_id=None)
        messages.append(reply.message)

        assert reply.report.difference is None

    assert session.branches == ["main"]


def test_a_character_cut_in_two_is_kept_with_the_ids_that_were_sampled(session, say, tokenizer):
    emoji = tokenizer.encode("🦜")
    reply = session.chat("Say parrot.", **say([*tokenizer.encode("A bird:"), *emoji[:-1]], stop=False))
    before = session.active.tokens
    report = session.send([user("Say parrot."), reply.message, user("Whole, please: 🦜 é ü 日本")])

    assert len(emoji) > 1
    assert "\N{REPLACEMENT CHARACTER}" in reply.text
    assert report.difference is None
    assert session.active.tokens[: len(before)] == before
    assert "🦜 é ü 日本" in session.active.text


@pytest.mark.parametrize("ending", [" ", "\n", " \n\n", ""])
@pytest.mark.parametrize("stop", [True, False])
def test_spaces_at_the_end_of_an_answer_stay_and_are_not_doubled(session, say, template_ids, tokenizer, ending, stop):
    spaces = [token for space in ending for token in tokenizer.encode(space)]  # not as the tokenizer would join them
    reply = session.chat("Count.", **say([*tokenizer.encode("One, two"), *spaces], stop=stop))
    session.fork("listed")
    session.send("Go on.")
    listed = session.send([user("Count."), reply.message, user("Go on.")], branch="listed")
    again = session.send([user("Count."), reply.message, user("Go on.")], branch="listed")

    assert reply.message == assistant(f"One, two{ending}")
    assert (listed.difference, again.difference) == (None, None)
    assert session.active.tokens == session.branch("listed").tokens
    assert session.active.text == tokenizer.decode(template_ids([user("Count."), reply.message, user("Go on.")]))


def test_what_a_list_does_not_have_goes_on_as_a_branch(session, say):
    messages = [SYSTEM, user("What is 2+2?")]
    reply = session.chat(messages, **say("It is 5."))
    before = session.active.tokens
    report = session.send([*messages, assistant("It is 4."), user("And 3+3?")])
    session.send([*messages, assistant("It is four."), user("And 3+3?")])

    difference = report.difference
    assert (difference.change, difference.message) == (Reason.MESSAGE_CHANGED, 2)
    assert difference.kept_as == "main~1"
    assert session.branch("main~1").tokens == before
    assert session.branch("main~1").messages == [*messages, reply.message]
    assert session.branches == ["main", "main~1", "main~2"]
    assert report.first_difference == difference.token == len(before) - 3
    assert "It is 5" in difference.old
    assert "It is 4" in difference.new


def test_a_shorter_list_asks_for_another_answer(session, say):
    messages = [SYSTEM, user("What is 2+2?")]
    session.chat(messages, **say("It is 5."))
    again = session.chat(messages, **say("It is 4."))

    assert again.report.difference.change is Reason.SHORTER
    assert again.report.difference.message == 2
    assert again.report.num_computed == len(again.tokens)
    assert session.branch("main~1").messages[-1] == assistant("It is 5.")


@pytest.mark.parametrize(
    ("change", "message", "edit"),
    [
        (Reason.MESSAGE_REMOVED, 1, lambda log: [log[0], *log[3:]]),
        (Reason.MESSAGE_INSERTED, 3, lambda log: [*log[:3], user("By the way"), *log[3:]]),
        (Reason.MESSAGE_CHANGED, 1, lambda log: [log[0], user("What is 2+3?"), *log[2:]]),
        (Reason.SYSTEM_CHANGED, 0, lambda log: log[1:]),
    ],
)
def test_a_report_says_how_a_list_differs(session, change, message, edit):
    log = [SYSTEM, user("What is 2+2?"), assistant("It is 4."), user("And 3+3?"), assistant("It is 6.")]
    session.send(log)
    report = session.send(edit(log))

    assert (report.difference.change, report.difference.message) == (change, message)


def test_no_system_message_is_not_an_empty_one(open_store):
    store = open_store()
    without, empty = store.create("without"), store.create("empty")
    without.send([user("Hello")])
    empty.send([{"role": "system", "content": ""}, user("Hello")])
    shared = next(
        index
        for index, pair in enumerate(zip(without.active.tokens, empty.active.tokens, strict=False))
        if pair[0] != pair[1]
    )
    report = without.send([{"role": "system", "content": ""}, user("Hello")])

    assert shared == 3
    assert report.difference.change is Reason.SYSTEM_CHANGED
    assert report.difference.token == 3
    assert report.difference.old.startswith("You are a helpful AI assistant named SmolLM")


# -- what clients do to their own prefix


def test_thinking_stripped_by_the_client_is_reused_up_to_the_stripped_message(session, say, template_ids, tokenizer):
    messages, thought = prompt_of(164, template_ids), thought_of(49, tokenizer)
    first = session.chat(messages, **say(thought))
    stripped = assistant(thought.split("</think>")[-1].strip())
    second = session.chat([*messages, stripped, user("Sure?")], **say("Yes."))

    assert (first.report.num_computed, len(first.tokens)) == (164 + 49 - 1, 49)
    difference = second.report.difference
    assert (second.report.num_reused, difference.token) == (164, 164)
    assert (difference.change, difference.message) == (Reason.THINKING_STRIPPED, 2)
    assert "<think>" in difference.old
    assert difference.new.startswith("The answer is 4.")


def test_thinking_that_stays_is_reused_whole(session, say, template_ids, tokenizer):
    messages, thought = prompt_of(164, template_ids), thought_of(49, tokenizer)
    first = session.chat(messages, **say(thought))
    turn = template_ids([*messages, user("Sure?")], prompt=True)[len(template_ids(messages)) :]
    second = session.chat([*messages, first.message, user("Sure?")], **say("Yes."))

    assert second.report.num_reused == 212
    assert second.report.num_computed == len([STOP, NEWLINE]) + len(turn) + len(second.tokens) - 1
    assert second.report.difference is None


def test_thinking_stripped_by_the_template_is_named_too(open_store, say, template_ids, tokenizer):
    session = open_store(template=STRIPPING).create("chat")
    messages, thought = prompt_of(164, template_ids), thought_of(49, tokenizer)
    first = session.chat(messages, **say(thought))
    second = session.chat([*messages, first.message, user("Sure?")], **say("Yes."))

    assert (second.report.num_reused, second.report.difference.message) == (164, 2)
    assert second.report.difference.change is Reason.THINKING_STRIPPED


def test_appending_keeps_the_thinking_that_the_template_would_strip(open_store, say, tokenizer):
    session = open_store(template=STRIPPING).create("chat")
    session.chat(user("What is 2+2?"), **say(thought_of(49, tokenizer)))
    before = session.active.num_tokens
    second = session.chat(user("Sure?"), **say("Yes."))

    assert second.report.num_reused == before - 1
    assert second.report.difference is None
    assert "<think>" in session.active.text


def test_strip_takes_the_thinking_out_when_the_user_speaks_again(session, say, template_ids, tokenizer):
    messages, thought = prompt_of(164, template_ids), thought_of(49, tokenizer)
    session.chat(messages, **say(thought))
    second = session.chat("Sure?", thinking="strip", **say("Yes."))

    answer = template_ids([*messages, assistant("The answer is 4."), user("Sure?"), assistant("Yes.")])
    assert session.active.tokens == answer[:-1]
    assert second.report.num_reused == 164
    assert second.report.difference.change is Reason.THINKING_STRIPPED
    assert (second.report.difference.message, second.report.difference.kept_as) == (2, "main~1")
    assert "<think>" in session.branch("main~1").text


def test_strip_of_a_list_asks_nothing_of_the_client(session, say):
    first = session.chat([SYSTEM, user("What is 2+2?")], **say("<think>two and two</think>It is 4."))
    log = [SYSTEM, user("What is 2+2?"), first.message, user("Sure?")]
    second = session.chat(log, thinking="strip", **say("<think>hm</think>Yes."))
    third = session.chat([*log, second.message, user("Really?")], thinking="strip", **say("Yes!"))

    assert [reply.report.difference.message for reply in (second, third)] == [2, 4]
    assert "<think>" not in session.active.text
    assert third.report.difference.change is Reason.THINKING_STRIPPED


def test_thinking_before_a_tools_answer_stays_until_the_user_speaks(session, say):
    session.chat("Weather?", thinking="strip", **say("<think>call it</think>weather()"))
    kept = session.chat({"role": "tool", "content": "sunny"}, thinking="strip", **say("<think>nice</think>Sunny."))
    text = session.active.text
    session.send("Thanks", thinking="strip")

    assert kept.report.difference is None
    assert text.count("<think>") == 2
    assert session.active.messages[1:4] == [
        assistant("weather()"),
        {"role": "tool", "content": "sunny"},
        assistant("Sunny."),
    ]


def clocked(time, *rest):
    return [{"role": "system", "content": f"Current time: 2026-09-01 12:00:{time}\nYou fix failing tests."}, *rest]


def test_a_clock_in_the_system_message_is_pointed_at(session, say, caplog):
    first = session.chat(clocked("01", user("Hello")), **say("Hi."))
    second = session.chat(clocked("02", user("Hello"), first.message, user("Go on")), **say("Well."))

    difference, (finding,) = second.report.difference, second.report.lint
    assert (difference.change, difference.message) == (Reason.SYSTEM_CHANGED, 0)
    assert difference.token == second.report.num_reused < 30
    assert difference.old.startswith("Current time: 2026-09-01 12:00:01")
    assert difference.new.startswith("Current time: 2026-09-01 12:00:02")
    assert (finding.lint, finding.message) == (Reason.SYSTEM_CHANGED, 0)
    assert "12:00:02" in finding.text
    assert "12:00:01" in finding.old_text
    assert "last" in finding.advice
    assert "system-changed" in caplog.text
    assert "12:00" not in caplog.text


def test_a_clock_that_comes_last_costs_nothing(session, say):
    log = [SYSTEM, user("Hello. Current time: 12:00:01")]
    first = session.chat(log, **say("Hi."))
    second = session.chat([*log, first.message, user("Go on. Current time: 12:00:02")], **say("Well."))

    assert second.report.difference is None
    assert second.report.lint == ()


def test_a_text_that_changes_every_time_is_found_wandering(session, say):
    def log(nonce):
        return [SYSTEM, user(f"Request {nonce}: look at the tests"), assistant("I look."), user("And?")]

    reports = [session.send(log(nonce)) for nonce in ("ab12", "cd34", "ef56")]

    assert [[finding.lint for finding in report.lint] for report in reports] == [[], [], [Reason.WANDERING]]
    (finding,) = reports[2].lint
    assert finding.message == 1
    assert "ef56" in finding.text
    assert "cd34" in finding.old_text


def test_tool_json_dumped_with_sorted_keys_is_named_in_a_list(session, say):
    emitted = '{"path": "a.py", "edits": [{"new": "x = 2", "old": "x = 1"}], "dry": false}'
    dumped = '{"dry": false, "edits": [{"new": "x = 2", "old": "x = 1"}], "path": "a.py"}'
    session.chat([SYSTEM, user("Edit a.py")], **say(emitted))
    report = session.send([SYSTEM, user("Edit a.py"), assistant(dumped), {"role": "tool", "content": "done"}])

    assert (report.difference.change, report.difference.message) == (Reason.JSON_REORDERED, 2)
    assert '{"path"' in report.difference.old
    assert '{"dry"' in report.difference.new


def test_tool_json_is_kept_as_emitted_when_messages_are_appended(session, say):
    reply = session.chat([SYSTEM, user("Edit a.py")], **say('{"path": "a.py", "dry": false}'))
    before = session.active.tokens
    report = session.send({"role": "tool", "content": "done"})

    assert report.difference is None
    assert session.active.tokens[: len(before)] == before
    assert report.num_reused == len(before) - 1
    assert session.active.messages[2] == reply.message


# -- what cannot be done


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "empty list"),
        ([user("a"), {"content": "b"}], "message 1: message without a role"),
        ({"role": "user"}, "without content"),
        ({"role": "user", "content": 3}, "must be a text"),
        ({"role": "user", "content": [{"type": "image", "url": "x"}]}, "part of type 'image'"),
        ([7], "message 0: a message is a dict"),
        ({"role": "user", "content": "a", "when": {1, 2}}, "cannot be stored"),
    ],
)
def test_what_is_no_message_is_refused(session, messages, said):
    session.send("Hello")
    before = session.active.tokens

    with pytest.raises(InvalidInputError, match=said):
        session.send(messages)
    assert session.active.tokens == before


def test_a_template_that_refuses_leaves_the_branch_as_it_was(open_store):
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    session = open_store(template=template).create("chat")
    session.send("Hello")
    before = (session.active.tokens, session.active.messages)

    with pytest.raises(InvalidInputError, match="no tools here"):
        session.send({"role": "tool", "content": "x"})
    with pytest.raises(InvalidInputError, match="no tools here"):
        session.chat([user("Hello"), {"role": "tool", "content": "x"}], max_new_tokens=1)
    assert (session.active.tokens, session.active.messages) == before


def test_without_a_template_the_error_says_what_to_do(store_path, tiny_chat):
    model, tokenizer = tiny_chat
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    with agentmem.open(store_path, model=model, tokenizer=tokenizer) as store:
        session = store.create("chat")

        with pytest.raises(InvalidInputError, match=r"set tokenizer\.chat_template"):
            session.send("Hello")


def test_without_a_tokenizer_the_error_says_what_to_do(store_path, llama):
    with agentmem.open(store_path, model=llama) as store:
        session = store.create("chat")

        with pytest.raises(InvalidInputError, match="pass tokenizer="):
            session.chat("Hello")


def test_there_must_be_something_to_answer(session):
    with pytest.raises(InvalidInputError, match="nothing to answer"):
        session.chat(max_new_tokens=1)


def test_a_mode_of_thinking_that_does_not_exist_is_refused(session):
    with pytest.raises(InvalidInputError, match="choose 'keep' or 'strip'"):
        session.send("Hello", thinking="hide")


class Interrupted(LogitsProcessor):
    """Stops a generation early, as a user does."""

    def __call__(self, input_ids, scores):
        raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [True, False])
def test_an_answer_that_is_interrupted_leaves_the_branch_as_it_was(session, say, stop):
    session.chat("What is 2+2?", **say("It is 4.", stop=stop))
    before = (session.active.tokens, session.active.messages)

    with pytest.raises(KeyboardInterrupt):
        session.chat("And 3+3?", max_new_tokens=4, logits_processor=LogitsProcessorList([Interrupted()]))
    assert (session.active.tokens, session.active.messages) == before
    assert session.chat("And 3+3?", **say("It is 6.")).report.difference is None


def test_an_option_that_no_branch_can_serve_sends_nothing(session):
    with pytest.raises(InvalidInputError, match="num_beams"):
        session.chat("Hello", num_beams=3)
    assert session.active.num_tokens == 0


# -- another process


CHILD = """
import sys, torch, agentmem
from transformers import AutoTokenizer
from agentmem.testing.script import Script
from agentmem.testing.models import tiny_model

torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
model = tiny_model("llama", vocab_size=len(tokenizer))
with agentmem.open(sys.argv[1], model=model, tokenizer=tokenizer) as store:
    session = store.create("chat")
    session.chat("What is 2+2?", max_new_tokens=12, do_sample=True, seed=1)
"""


def test_a_chat_goes_on_in_another_process_without_computing_again(store_path, tiny_chat, say):
    from agentmem.testing.models import smollm2_folder

    folder = smollm2_folder(Path(__file__).parent.parent / ".models")
    model, tokenizer = tiny_chat
    subprocess.run([sys.executable, "-c", CHILD, store_path, folder], check=True, timeout=120)
    with agentmem.open(store_path, model=model, tokenizer=tokenizer) as store:
        session = store.resume("chat")
        before = session.active.num_tokens
        asked, answered = session.active.messages
        reply = session.chat([asked, answered, user("Sure?")], **say("Yes."))

    assert (asked, answered["role"]) == (user("What is 2+2?"), "assistant")
    assert reply.report.num_reused == before - 1
    assert reply.report.num_computed == reply.report.num_tokens - before
    assert reply.report.difference is None
