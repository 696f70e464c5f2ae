"""Conversations become the text that `transformers` writes, and what the assistant says in it is known."""

import json

import jinja2
import pytest
import tokenizers

from spmd.data.chat import (
    BadConversationError,
    ChatConfig,
    ChatTemplate,
    Conversation,
    find_template,
    read_conversation,
)
from spmd.data.tokenizer import load_tokenizer
from spmd.errors import ConfigError, DataError

CHATML = (
    "{% for m in messages %}\n{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' "
    "+ m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}"
    "{{ text }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{%- for m in messages -%}\n    {{- '<|im_start|>' + m['role'] + '\\n' -}}\n"
    "    {%- if m['role'] == 'assistant' -%}\n"
    "        {%- generation -%}{{- m['content'] + '<|im_end|>' -}}{%- endgeneration -%}\n"
    "    {%- else -%}{{- m['content'] + '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}\n{%- endfor -%}"
)
TOOLS = (
    "{% if tools %}Tools: {{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}{% if loop.last %}"
    "{% continue %}{% endif %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% endfor %} on {{ strftime_now('%Y') }}"
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "  It is 4, é 😀.\n\n"},
    {"role": "user", "content": "And <b>'3 + 3'</b>?\n"},
    {"role": "assistant", "content": "6"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *PLAIN]


def template(source: str, **fields) -> ChatTemplate:
    return ChatTemplate(source, "a template", TOKENS, **fields)


def words() -> tokenizers.Tokenizer:
    """A byte-level tokenizer with a few merges, which leaves spaces out of the characters of a token."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    model.decoder = tokenizers.decoders.ByteLevel()
    special = ["</s>", "<s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([m["content"] for m in SYSTEM] * 3, trainer)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer's folder, with the settings that `transformers` reads."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    """The same tokenizer in `transformers`."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("source", "messages"),
    [(CHATML, PLAIN), (CHATML, SYSTEM), (LLAMA3, SYSTEM), (MISTRAL, PLAIN), (MARKED, SYSTEM), (MARKED, PLAIN[:1])],
    ids=["chatml", "chatml-system", "llama3", "mistral", "marked", "prompt"],
)
def test_text_and_ids_are_those_of_transformers(source, messages, folder, theirs):
    """With and without the prompt for an answer, to the character and the id; the control has another template."""
    ours, tokenizer = template(source), load_tokenizer(str(folder / "tokenizer.json"))
    for prompt in (False, True):
        text = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=prompt)
        said = ours.render(messages, prompt=prompt).replace("\ufdd0", "").replace("\ufdd1", "")
        assert said == text
        assert said != theirs.apply_chat_template(messages, chat_template=CHATML + ".", tokenize=False)
        ids = theirs.apply_chat_template(messages, chat_template=source, add_generation_prompt=prompt)
        ids = ids if isinstance(ids, list) else ids["input_ids"]
        assert tokenizer.encode_chat(text)[0].tolist() == ids


def test_marked_tokens_are_those_of_transformers(folder, theirs):
    """The mask by `{% generation %}` blocks is theirs, and the mask by prefixes has also the ends of turns."""
    # They leave out spaces that begin an answer, which no token of this tokenizer says to be its own.
    messages = tuple({**message, "content": message["content"].lstrip()} for message in SYSTEM)
    found = theirs.apply_chat_template(
        list(messages), chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    masks = {}
    for source in (MARKED, CHATML):
        written = template(source).write(Conversation(messages))
        _, characters = load_tokenizer(str(folder / "tokenizer.json")).encode_chat(written.text)
        masks[source] = sum(
            ((characters[:, 0] < end) & (characters[:, 1] > begin)).astype(int) for begin, end in written.spans
        )
    assert masks[MARKED].tolist() == found["assistant_masks"]
    assert 0 < masks[MARKED].sum() == masks[CHATML].sum() - 2
    assert (masks[CHATML] >= masks[MARKED]).all()


def test_tools_and_the_date_are_given_to_the_template(theirs):
    """As `transformers` gives them, with loop controls; without a date such a template is refused."""
    from datetime import UTC, datetime

    now = datetime.now(UTC).replace(tzinfo=None)
    tools = [{"type": "function", "function": {"name": "f<", "parameters": {}}}]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "é"}]}]
    line = {"messages": [*messages, PLAIN[0]], "tools": tools}
    text = theirs.apply_chat_template(line["messages"], tools=tools, chat_template=TOOLS, tokenize=False)
    read = read_conversation(line)
    assert template(TOOLS, now=now).render(read.messages, read.tools) == text
    with pytest.raises(DataError, match=r"may write today's date\n.*\n.*--chat\.date"):
        template(TOOLS)
    with pytest.raises(ConfigError, match=r"chat\.date: is 'tomorrow'"):
        ChatConfig(date="tomorrow")


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


def test_spans_are_what_the_assistant_says():
    """Of prefixes, all that follows the prompt for an answer; of generation blocks, what is in them."""
    for source, said in (
        (CHATML, ["  It is 4, é 😀.\n\n<|im_end|>\n", "6<|im_end|>\n"]),
        (LLAMA3, ["It is 4, é 😀.<|eot_id|>", "6<|eot_id|>"]),
        (MISTRAL, ["   It is 4, é 😀.\n\n</s>", " 6</s>"]),
        (MARKED, ["  It is 4, é 😀.\n\n<|im_end|>", "6<|im_end|>"]),
    ):
        written = template(source).write(Conversation(tuple(PLAIN)))
        assert [written.text[begin:end] for begin, end in written.spans] == said
        assert "\ufdd0" not in written.text


def test_turns_that_cannot_be_told_apart_are_refused():
    """A template that changes what is before a turn is named with the place; with marks it is no problem."""
    last = "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }};{% endfor %}"
    with pytest.raises(BadConversationError, match=r"message 2.*differ at character 0: '!What is") as caught:
        template(last).write(Conversation(tuple(PLAIN)))
    assert "generation" in caught.value.fix
    marked = last.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert len(template(marked).write(Conversation(tuple(PLAIN))).spans) == 4


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
    "no text": ({"messages": [{"role": "user", "content": 3}]}, 'message 1 has no text under "content"'),
    "an empty answer": (
        {"messages": [PLAIN[0], {"role": "assistant", "content": " \n"}]},
        "message 2, the assistant's, is empty",
    ),
    "no answer": ({"messages": PLAIN[:1]}, "no message is the assistant's"),
    "a mark": ({"messages": [{"role": "user", "content": "\ufdd0"}]}, "U+FDD0"),
    "two": ({"messages": [3, {"role": "bot", "content": "x"}]}, "message 1 has no role; message 1 has no text"),
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
    (first / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, "bos_token": None}))
    (second / "tokenizer_config.json").write_text(json.dumps({"chat_template": "second", "eos_token": "<2>"}))
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
    with pytest.raises(DataError, match=r"has no chat template\n.*it is bytes\n.*--chat\.template FILE"):
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
