"""Chat templates of other families, and tokenizers of another make: what `send` and `chat` promise holds for all.

The templates are those of the families, shortened where that changes nothing; the special tokens are SmolLM2's or a
small tokenizer's, and the model is tiny and random.
"""

import copy
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LogitsProcessorList, PreTrainedTokenizerFast

import agentmem
from agentmem import InvalidInputError, Reason
from agentmem.testing.script import Script

pytestmark = pytest.mark.usefixtures("one_thread")

QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content =
                    content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n')
                    + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3 = (
    "{{- '<|endoftext|>' }}{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '<|im_start|>\n\n' + message['content'] | trim + '<|im_end|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_start|>\n\n' }}{%- endif %}"
)
"""Begins with BOS, trims contents, has no line break behind a message."""

GEMMA = (
    "{{ '<|endoftext|>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<|im_start|>' + role + '\n' + message['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>model\n'}}{% endif %}"
)
"""Wants roles to alternate, and calls the assistant otherwise."""

MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}"
    "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
    "{{- '<|endoftext|>' }}{%- for message in loop_messages %}"
    "{%- if message['role'] == 'user' %}{%- if loop.last and system_message is defined %}"
    "{{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}{%- else %}"
    "{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}"
    "{%- else %}{{- ' ' + message['content'] + '<|im_end|>'}}{%- endif %}{%- endfor %}"
)
"""Shows the system message before the last user message, wherever that is; has no header of answers."""

LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""Has no special token between the question and the answer."""

PLAIN = (
    "{% for message in messages %}{{ '### ' + message['role'] + ':\n' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
"""Has no special token at all."""

TEMPLATES = {"qwen3": QWEN3, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "llama2": LLAMA2, "plain": PLAIN}

STABLE = ["llama3", "gemma", "llama2", "plain"]
"""Templates that begin with more messages as they do with fewer."""

BOS, STOP = 0, 2
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
LISTING = {"type": "function", "function": {"name": "list", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def open_session(store_path, tiny_chat):
    """Open a session over SmolLM2's tokens with another template, or over another tokenizer and model."""
    opened = []

    def open_it(template, model=None, tokenizer=None):
        tiny, smollm2 = tiny_chat
        tokenizer = copy.deepcopy(smollm2) if tokenizer is None else tokenizer
        tokenizer.chat_template = template
        opened.append(agentmem.open(store_path, model=tiny if model is None else model, tokenizer=tokenizer))
        return opened[-1].create("chat"), tokenizer

    yield open_it
    for store in opened:
        store.close()


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def say(tokens):
    return {
        "logits_processor": LogitsProcessorList([Script(tokens)]),
        "max_new_tokens": len(tokens),
        "eos_token_id": STOP,
    }


def answer(tokenizer, text):
    return say([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id])


def rendered(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


# -- every template


@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_one_by_one_are_the_list_of_them(open_session, name):
    session, tokenizer = open_session(TEMPLATES[name])
    first = session.chat("What is 2+2?", **answer(tokenizer, "It is 4."))
    second = session.chat("And 3+3?", **answer(tokenizer, "It is 6."))
    before = session.active.tokens[:-1]
    log = [user("What is 2+2?"), first.message, user("And 3+3?"), second.message]
    report = session.send([*log, user("Thank you.")])

    assert session.active.messages == [*log, user("Thank you.")]
    assert report.difference is None
    assert session.active.tokens[: len(before)] == before


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_lists_sampled_ids_are_kept(open_session, name):
    session, _ = open_session(TEMPLATES[name])
    log = []
    for turn in range(4):
        log.append(user(f"Turn {turn}."))
        reply = session.chat(log, max_new_tokens=20, do_sample=True, seed=turn, suppress_tokens=[0, 1, STOP])
        log.append(reply.message)

        assert reply.report.difference is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_of_a_branch_is_the_templates_but_for_spaces_beside_an_answer(open_session, name):
    session, tokenizer = open_session(TEMPLATES[name])
    session.chat("What is 2+2?", **answer(tokenizer, "It is 4."))
    session.send("And 3+3?")
    text = rendered(tokenizer, [user("What is 2+2?"), assistant("It is 4."), user("And 3+3?")])

    assert "".join(session.active.text.split()) == "".join(text.split())
    assert session.active.tokens.count(STOP) == text.count("<|im_end|>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_first_tokens_are_the_tokenizers_own(open_session, name):
    session, tokenizer = open_session(TEMPLATES[name])
    session.send([user("What is 2+2?"), assistant("It is 4."), user("And 3+3?")])
    text = rendered(tokenizer, [user("What is 2+2?"), assistant("It is 4."), user("And 3+3?")])

    assert session.active.tokens == tokenizer.encode(text, add_special_tokens=False)
    assert session.active.tokens[:2] != [BOS, BOS]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_changed_message_is_found_in_every_template(open_session, name):
    session, _ = open_session(TEMPLATES[name])
    log = [user("What is 2+2?"), assistant("It is 4."), user("And 3+3?"), assistant("It is 6."), user("Bye.")]
    session.send(log)
    report = session.send([*log[:2], user("And 4+4?"), *log[3:]])

    assert (report.difference.change, report.difference.message) == (Reason.MESSAGE_CHANGED, 2)
    assert "3+3" in report.difference.old
    assert "4+4" in report.difference.new


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_without_its_note_a_branch_is_gone_on_with_all_the_same(open_session, name, stop):
    session, tokenizer = open_session(TEMPLATES[name])
    tokens = tokenizer.encode("It is 4.", add_special_tokens=False)
    first = session.chat("What is 2+2?", **say([*tokens, STOP] if stop and name != "plain" else tokens))
    session.active.extras.clear()
    session.fork("listed")
    session.send("And 3+3?")
    log = [user("What is 2+2?"), first.message, user("And 3+3?")]
    report = session.send(log, branch="listed")
    text = rendered(tokenizer, log)

    assert "".join(session.active.text.split()) == "".join(text.split())
    assert session.active.messages == [user("And 3+3?")]
    assert session.branch("listed").messages == log
    assert report.difference is None or name in {"mistral", "llama2"}  # a space that these put beside an answer


# -- one template's ways


def test_qwen3_thinking_stays_until_the_client_sends_the_list(open_session):
    session, tokenizer = open_session(QWEN3)
    first = session.chat("What is 2+2?", **answer(tokenizer, "<think>\ntwo and two\n</think>\n\nIt is 4."))
    appended = session.chat("Sure?", **answer(tokenizer, "<think>\nhm\n</think>\n\nYes."))
    sent = session.send([user("What is 2+2?"), first.message, user("Sure?"), appended.message, user("Really?")])

    assert appended.report.difference is None
    assert (sent.difference.change, sent.difference.message) == (Reason.THINKING_STRIPPED, 1)
    assert session.active.text == rendered(tokenizer, session.active.messages)


def test_qwen3_without_thinking_puts_an_empty_block_into_the_header(open_session):
    session, tokenizer = open_session(QWEN3)
    off = {"enable_thinking": False}
    first = session.chat("What is 2+2?", template_options=off, **answer(tokenizer, "It is 4."))
    second = session.chat("Sure?", template_options=off, **answer(tokenizer, "Yes."))
    sent = session.send([user("What is 2+2?"), first.message, user("Sure?"), second.message, user("Really?")])

    assert session.branch("main~1").text.count("<think>\n\n</think>\n\n") == 2
    assert second.report.difference is None
    assert sent.difference.change is Reason.THINKING_STRIPPED


def test_qwen3_thinking_that_was_sent_is_stripped_as_well(open_session):
    session, _ = open_session(QWEN3)
    session.send(user("What is 2+2?"))
    session.send(assistant("<think>two and two</think>It is 4."))
    rewritten = session.active.text
    report = session.send(user("Sure?"), thinking="strip")

    assert "<think>\ntwo and two\n</think>\n\nIt is 4." in rewritten
    assert (report.difference.change, report.difference.message) == (Reason.THINKING_STRIPPED, 1)
    assert session.active.messages == [user("What is 2+2?"), assistant("It is 4."), user("Sure?")]
    assert "two and two" not in session.active.text


def test_qwen3_tool_results_share_one_turn(open_session):
    session, tokenizer = open_session(QWEN3)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}]}
    log = [user("Look twice."), call, {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    for message in log:
        session.send(message)
    session.fork("other")
    text = session.active.text
    report = session.send([*log, user("Thanks.")])

    assert text.endswith(rendered(tokenizer, log)[rendered(tokenizer, log).index("<tool_response>") :])
    assert text.count("<|im_start|>") == 3
    assert session.branch("other").messages == log
    assert report.difference is None or report.difference.message == 1


def test_tools_are_part_of_the_beginning(open_session):
    session, tokenizer = open_session(QWEN3)
    session.chat("List files.", tools=[TOOL], **answer(tokenizer, "a.py"))
    same = session.send(user("And?"), tools=[TOOL])
    left = session.send(user("More?"))
    before = session.active.messages
    changed = session.send(user("All?"), tools=[LISTING])

    assert same.difference is None
    assert left.difference is None
    assert (changed.difference.change, changed.difference.message) == (Reason.TOOLS_CHANGED, 0)
    assert '"look"' in session.branch("main~1").text
    assert '"list"' in session.active.text
    assert session.active.messages == [*before, user("All?")]


def test_changed_tools_need_a_beginning_that_can_be_rendered(open_session):
    session, _ = open_session(QWEN3)
    session.append("<|im_start|>system\nBe brief.<|im_end|>\n")
    session.send("Hello")

    with pytest.raises(InvalidInputError, match="send the whole list"):
        session.send("List files.", tools=[TOOL])


def test_mistral_says_the_system_message_once(open_session):
    session, tokenizer = open_session(MISTRAL)
    session.chat([{"role": "system", "content": "Be brief."}, user("2+2?")], **answer(tokenizer, "4"))
    session.send("3+3?")

    assert session.active.text.count("Be brief.") == 1
    assert session.active.text.endswith("[/INST]4<|im_end|>[INST] 3+3?[/INST]")


def test_gemma_refuses_what_does_not_alternate(open_session):
    session, _ = open_session(GEMMA)
    session.send("Hello")
    before = session.active.tokens

    with pytest.raises(InvalidInputError, match="must alternate"):
        session.send("Hello?")
    assert session.active.tokens == before


def test_bos_stands_at_the_beginning_once(open_session, tokenizer):
    session, _ = open_session(LLAMA3)
    session.chat("Hello", **answer(tokenizer, " Hi. \n"))
    session.chat("Sure?", **answer(tokenizer, "Yes."))
    session.send([*session.active.messages, user("Really?")])

    assert session.active.tokens[0] == BOS
    assert session.active.tokens.count(BOS) == 1
    assert session.branches == ["main"]


def test_spaces_that_a_template_trims_do_not_cost_the_sampled_ids(open_session, tokenizer):
    session, _ = open_session(LLAMA3)
    sampled = [*tokenizer.encode(" Hi."), 198, 198]
    first = session.chat("Hello", **say([*sampled, STOP]))
    report = session.send([user("Hello"), first.message, user("Really?")])

    assert first.message["content"] == " Hi.\n\n"
    assert report.difference is None
    assert session.active.text.count(" Hi.\n\n<|im_end|>") == 1


def test_another_template_is_named(store_path, tiny_chat):
    model, tokenizer = tiny_chat
    tokenizer = copy.deepcopy(tokenizer)
    log = [user("Hello"), assistant("Hi."), user("And?")]
    tokenizer.chat_template = LLAMA3
    with agentmem.open(store_path, model=model, tokenizer=tokenizer) as store:
        store.create("chat").send(log)
    tokenizer.chat_template = PLAIN
    with agentmem.open(store_path, model=model, tokenizer=tokenizer) as store:
        session = store.resume("chat")
        appended = session.send(assistant("Well."))
        listed = session.send([*log, assistant("Well.")])

    assert [finding.lint for finding in appended.lint] == [Reason.TEMPLATE_CHANGED]
    assert listed.difference.change is Reason.TEMPLATE_CHANGED


# -- a tokenizer of another make


@pytest.fixture(scope="module")
def pieces():
    """A small tokenizer of sentencepiece's kind: spaces are letters, a text begins with one, others are bytes."""
    words = "What is 2+2 ? It is 4. And 3+3 It is 6. Thank you. Hello there Turn assistant user system [INST] [/INST] "
    spaces = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = spaces
    trained.train_from_iterator([words * 3], trainers.BpeTrainer(vocab_size=160, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned["vocab"]]
    vocab = {letter: index for index, letter in enumerate(dict.fromkeys(letters))}
    merges = [tuple(merge) for merge in learned["merges"]]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = spaces
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("name", ["llama2", "plain"])
def test_a_tokenizer_that_puts_a_space_first_is_served_too(open_session, pieces, tiny, name):
    session, tokenizer = open_session(TEMPLATES[name], model=tiny("llama"), tokenizer=copy.deepcopy(pieces))
    first = session.chat("What is 2+2?", **answer(tokenizer, "It is 4."))
    second = session.chat("And 3+3?", max_new_tokens=12, do_sample=True, seed=3)
    before = session.active.tokens
    log = session.active.messages
    report = session.send([*log, user("Thank you. 🦜")])

    assert [message["role"] for message in log] == ["user", "assistant"] * 2
    assert (first.text.strip(), log[3]) == ("It is 4.", second.message)
    assert report.difference is None
    assert session.active.tokens[: len(before)] == before
    assert "🦜" in session.active.text


# -- layers with a state


def test_stripping_costs_a_recurrent_model_the_answer_only(open_session, tiny, tokenizer):
    session, _ = open_session(tokenizer.chat_template, model=tiny("qwen3_next", vocab_size=len(tokenizer)))
    session.send("What is 2+2? " * 20)
    session.checkpoint("asked")
    first = session.chat(**answer(tokenizer, "<think>" + " so" * 40 + "</think>It is 4."))
    second = session.chat("Sure?", thinking="strip", **answer(tokenizer, "Yes."))

    prompt = first.report.num_tokens - len(first.tokens)
    header = 4  # <|im_start|>assistant and a line break: a layer state is kept before them
    assert second.report.difference.token == prompt
    assert second.report.num_computed <= second.report.num_tokens - 1 - prompt + header + 1
