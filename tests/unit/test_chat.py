"""Conversations become the text that `transformers` writes, and what the assistant says in it is known."""

import json

import jinja2
import numpy as np
import pytest

from spmd.data.chat import (
    BadConversationError,
    ChatConfig,
    Conversation,
    each_turn,
    find_template,
    read_conversation,
)
from spmd.data.chat_corpus import trained_tokens
from spmd.data.tokenizer import ByteTokenizer, load_tokenizer
from spmd.errors import ConfigError, DataError
from tests.chats import (
    CHATML,
    LLAMA3,
    MARKED,
    MISTRAL,
    PLAIN,
    THINKING,
    TOOLS,
    template,
    write_tokenizer,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer's folder, with the settings that `transformers` reads."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("name", ["bytes", "words"])
def test_every_character_is_of_a_token(name, folder):
    """Characters of tokens follow each other without a gap: spaces and parts of characters are of one, too."""
    tokenizer = load_tokenizer("bytes" if name == "bytes" else str(folder / "tokenizer.json"))
    text = "<|im_start|>a\n  é 😀 What is\n\n<|im_end|>  \n"
    ids, characters = tokenizer.encode_chat(text)
    assert (len(ids), 2) == characters.shape
    assert (characters[1:, 0] <= characters[:-1, 1]).all()
    assert (characters[:, 0] < characters[:, 1]).all()
    assert (characters[0, 0], characters[-1, 1]) == (0, len(text))


def test_parts_are_what_the_assistant_says():
    """Of prefixes, all that follows the prompt for an answer; of generation blocks, what is in them."""
    for source, said in (
        (CHATML, ["  It is 4, é 😀.\n\n<|im_end|>\n", "6<|im_end|>\n"]),
        (LLAMA3, ["It is 4, é 😀.<|eot_id|>", "6<|eot_id|>"]),
        (MISTRAL, ["   It is 4, é 😀.\n\n</s>", " 6</s>"]),
        (MARKED, ["  It is 4, é 😀.\n\n<|im_end|>", "6<|im_end|>"]),
    ):
        written = template(source).write(Conversation(tuple(PLAIN)))
        assert [written.text[begin:end] for begin, end, _ in written.parts] == said
        assert "\ufdd0" not in written.text


CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "two"}}}]


@pytest.mark.parametrize("flag", ["weight", "train", "training", "loss", "trainable"])
@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["prefixes", "marked"])
def test_a_turn_that_is_marked_not_to_be_trained_is_not(source, flag):
    """0 and false turn it off, in the text that it had; control: 1 and true are as no flag."""
    every = template(source).write(Conversation(tuple(PLAIN)))
    for off, on in ((0, 1), (False, True), (0.0, 1.0)):
        for value, kept in ((off, every.parts[1:]), (on, every.parts)):
            line = {"messages": [{**PLAIN[0], flag: off}, {**PLAIN[1], flag: value}, *PLAIN[2:]]}
            written = template(source).write(read_conversation(line))
            assert written.text == every.text
            assert written.parts == kept


@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["prefixes", "marked"])
def test_a_turn_has_its_weight(source):
    """Of each of its tokens; the text and the parts are those without weights."""
    every = template(source).write(Conversation(tuple(PLAIN)))
    messages = [*PLAIN[:3], {**PLAIN[3], "weight": 0.25}]
    written = template(source).write(read_conversation({"messages": messages}))
    assert written.text == every.text
    assert [part[:2] for part in written.parts] == [part[:2] for part in every.parts]
    assert [part.weight for part in written.parts] == [1.0, 0.25]
    tokenizer = ByteTokenizer()
    _, characters, weights = trained_tokens(tokenizer, written)
    _, _, mask = trained_tokens(tokenizer, every)
    begin, end, _ = written.parts[1]
    is_last = (characters[:, 0] >= begin) & (characters[:, 0] < end)
    assert mask.dtype == bool
    assert (weights == np.where(is_last, 0.25, mask)).all()


def test_each_turn_has_what_a_model_saw_before_it():
    """A template that leaves out earlier thoughts needs each turn by itself: all together are refused."""
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "two twos"},
        {"role": "user", "content": "3 + 3?"},
        {"role": "assistant", "content": "6", "reasoning_content": "two threes"},
    ]
    conversation = read_conversation({"messages": messages})
    writer = template(THINKING)
    with pytest.raises(BadConversationError) as caught:
        writer.write(conversation)
    assert caught.value.fix.startswith("--chat.turns each")
    said = []
    for turn in each_turn(conversation):
        written = writer.write(turn)
        ((begin, end, _),) = written.parts
        said.append(written.text[begin:end])
        assert written.text[:begin] == writer.prompt(turn.messages[:-1])
    assert said == [
        "<think>\ntwo twos\n</think>\n\n4<|im_end|>\n",
        "<think>\ntwo threes\n</think>\n\n6<|im_end|>\n",
    ]


def test_a_block_is_of_the_message_whose_texts_it_has():
    """Also of one that only calls a tool, and with two blocks in a message; a block of several turns is refused."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking %}{% generation %}({{ m.thinking }})"
        "{% endgeneration %}{% endif %}{% generation %}{{ m.content | trim }}{% for c in m.tool_calls %}"
        "{{ c.function | tojson }}{% endfor %};{% endgeneration %}{% else %}{{ m.content }}?{% endif %}{% endfor %}"
    )
    asked = {"role": "user", "content": "q"}
    turns = [
        {"role": "assistant", "tool_calls": CALLS, "content": ""},
        {"role": "assistant", "thinking": "hm", "content": " a "},
        {"role": "assistant", "content": "b"},
    ]
    called = '{"name": "add", "arguments": {"a": 2, "b": "two"}};'
    for off, said in ((0, ["(hm)", "a;", "b;"]), (1, [called, "b;"]), (2, [called, "(hm)", "a;"])):
        flagged = [{**turn, "weight": int(number != off)} for number, turn in enumerate(turns)]
        written = template(source).write(read_conversation({"messages": [asked, *flagged]}))
        assert [written.text[begin:end] for begin, end, _ in written.parts] == said
    together = (
        "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    )
    with pytest.raises(
        BadConversationError, match="cannot be told apart: generation block 1 is not of one message"
    ):
        template(together).write(
            read_conversation({"messages": [asked, turns[1], {**turns[2], "weight": 0}]})
        )


@pytest.mark.parametrize(
    ("number", "flags", "says"),
    [
        (1, {"weight": -0.5}, '"weight": -0.5, which is no number from 0 to 1e+06'),
        (1, {"weight": float("nan")}, '"weight": nan, which is no number from'),
        (1, {"train": 0.5}, '"train": 0.5, which is none of 0, 1, false and true'),
        (1, {"weight": 0.5, "train": False}, '"weight": 0.5 and "train": False, which disagree'),
        (0, {"weight": 0.5}, "only messages of the assistant are"),
        (1, {"train": "false"}, "\"train\": 'false', which is none of"),
        (1, {"weight": 1, "loss": [1]}, '"loss": [1], which is none of'),
        (1, {"weight": 1, "train": False}, '"weight": 1 and "train": False, which disagree'),
        (0, {"trainable": True}, "only messages of the assistant are"),
        (1, {"training": 0}, "every message of the assistant is marked not to be trained"),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_refused(number, flags, says):
    """Another value, two that disagree, a turn without a mask, and a conversation of which nothing is left."""
    messages = [dict(message) for message in PLAIN[:2]]
    messages[number] |= flags
    with pytest.raises(BadConversationError) as caught:
        read_conversation({"messages": messages})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "reads",
    [
        "{{ m.name }}",
        "{{ m['name'] }}",
        "{{ m.get('name') }}",
        "{% if 'name' in m %}{% endif %}",
        "{{ m | tojson }}",
        "{% for k, v in m.items() %}{% endfor %}",
        "{% for k in m %}{% endfor %}",
        "{{ m.values() | list }}",
    ],
)
def test_the_fields_that_a_template_reads_are_known(reads):
    """However it reads them; control: one that does not."""
    messages = Conversation(({"role": "assistant", "content": "x", "name": "bob"},))
    start = "{% for m in messages %}{{ m.content }}"
    assert "name" in template(start + reads + "{% endfor %}").write(messages).read
    assert template(start + "{% endfor %}").write(messages).read == {"content"}


def test_turns_that_cannot_be_told_apart_are_refused():
    """A template that changes what is before a turn is named with the place; with marks it is no problem."""
    last = "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }};{% endfor %}"
    with pytest.raises(
        BadConversationError, match=r"message 2.*differ at character 0: '!What is"
    ) as caught:
        template(last).write(Conversation(tuple(PLAIN)))
    assert "generation" in caught.value.fix
    marked = last.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert len(template(marked).write(Conversation(tuple(PLAIN))).parts) == 4


@pytest.mark.parametrize(
    "line",
    [
        {"messages": PLAIN[:2]},
        {
            "conversations": [
                {"from": "human", "value": "What is 2 + 2?"},
                {"from": "gpt", "value": PLAIN[1]["content"]},
            ]
        },
        {"prompt": "What is 2 + 2?", "completion": PLAIN[1]["content"]},
        {"messages": PLAIN[:2], "id": 7, "tools": None},
    ],
    ids=["messages", "conversations", "prompt", "more"],
)
def test_conversations_of_several_forms(line):
    """They are the same messages."""
    assert read_conversation(line) == Conversation(tuple(PLAIN[:2]))


BAD_LINES = {
    "no object": ([], "the line is not an object"),
    "no messages": ({"mesages": []}, "it has mesages"),
    "no list": ({"messages": "hi"}, '"messages" is not a list'),
    "an empty list": ({"conversations": []}, '"conversations" has no message'),
    "no role": ({"messages": [{"content": "x"}]}, "message 1 has no role"),
    "a role": (
        {"messages": [{"role": "asistant", "content": "x"}]},
        "unknown role 'asistant' (did you mean \"assistant\"?)",
    ),
    "no text": (
        {"messages": [{"role": "user", "content": 3}]},
        'message 1 has no text under "content"',
    ),
    "an empty answer": (
        {"messages": [PLAIN[0], {"role": "assistant", "content": " \n"}]},
        "message 2, the assistant's, is empty",
    ),
    "no answer": ({"messages": PLAIN[:1]}, "no message is the assistant's"),
    "a mark": ({"messages": [{"role": "user", "content": "\ufdd0"}]}, "U+FDD0"),
    "two": (
        {"messages": [3, {"role": "bot", "content": "x"}]},
        "message 1 has no role; message 1 has no text",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_what_is_wrong_with_a_line_is_said(name):
    """All of it."""
    line, says = BAD_LINES[name]
    with pytest.raises(BadConversationError) as caught:
        read_conversation(line)
    assert says in str(caught.value)


def test_a_template_may_name_roles_of_its_own():
    """A role that its source names is one."""
    ours = template("{% if messages[0].role == 'critic' %}{% endif %}")
    assert ours.knows("critic")
    assert ours.knows("system")
    assert not ours.knows("bot")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('Only user first') }}", "the template refuses: Only user first"),
        ("{{ messages[0].name + 'x' }}", "the template fails: UndefinedError"),
        ("{{ 1 / 0 }}", "the template fails: ZeroDivisionError"),
        ("{{ messages.append(1) }}", "the template fails: SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "the template fails: SecurityError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "the template fails: OverflowError"),
    ],
)
def test_a_template_that_fails_is_said(source, says):
    """Its own refusal, an error of it, and what the sandbox does not allow."""
    with pytest.raises(BadConversationError, match=says):
        template(source).render(PLAIN)


def test_where_a_template_is_found(tmp_path):
    """A file that the config names, `chat_template.jinja`, then a text or a list in the settings, of each folder."""
    first, second = tmp_path / "first", tmp_path / "second"
    for each in (first, second):
        each.mkdir()
    (first / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "bos_token": None})
    )
    (second / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "second", "eos_token": "<2>"})
    )
    found = find_template(ChatConfig(), [first, second], {})
    assert (found.source, found.tokens) == ("second", {"eos_token": "</s>"})
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"}]
    (first / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert find_template(ChatConfig(), [first, second], {}).source == "listed"
    (first / "chat_template.jinja").write_text("file")
    assert find_template(ChatConfig(), [first, second], {}).source == "file"
    (tmp_path / "own").write_text("own")
    assert find_template(ChatConfig(template=str(tmp_path / "own")), [first], {}).source == "own"


def test_a_template_that_is_not_there_is_said(tmp_path):
    """No folder, a folder without one, a file that is not there, settings that are no JSON, and no Jinja."""
    with pytest.raises(
        DataError, match=r"has no chat template\n.*it is bytes\n.*--chat\.template FILE"
    ):
        find_template(ChatConfig(), [], {})
    with pytest.raises(DataError, match=r"data\.tokenizer: has no chat template"):
        find_template(ChatConfig(), [tmp_path], {})
    with pytest.raises(DataError, match="cannot be read"):
        find_template(ChatConfig(template=str(tmp_path / "none")), [], {})
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: cannot be read"):
        find_template(ChatConfig(), [tmp_path], {})
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"chat_template\.jinja: is not a Jinja template"):
        find_template(ChatConfig(), [tmp_path], {})


def test_control_jinja_alone_writes_another_text():
    """Without trimmed blocks the lines of a template's tags are in the text: the environment is seen."""
    assert jinja2.Template(CHATML).render(messages=PLAIN) != template(CHATML).render(PLAIN)


def test_the_date_is_asked_for():
    """Without a date a template that writes today's is refused, and a date that is none."""
    with pytest.raises(DataError, match=r"may write today's date\n.*\n.*--chat\.date"):
        template(TOOLS)
    with pytest.raises(ConfigError, match=r"chat\.date: is 'tomorrow'"):
        ChatConfig(date="tomorrow")
