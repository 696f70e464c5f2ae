"""Conversations become the text, ids and masks that `transformers` makes of them."""

from datetime import UTC, datetime

import pytest

from spmd.data.chat import Conversation, read_conversation
from spmd.data.tokenizer import load_tokenizer
from tests.chats import (
    CHATML,
    LLAMA3,
    MARKED,
    MISTRAL,
    PLAIN,
    SYSTEM,
    TOOLS,
    template,
    write_tokenizer,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer's folder, with the settings that `transformers` reads."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def theirs(folder):
    """The same tokenizer in `transformers`, which `make newest` does not install."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (CHATML, PLAIN),
        (CHATML, SYSTEM),
        (LLAMA3, SYSTEM),
        (MISTRAL, PLAIN),
        (MARKED, SYSTEM),
        (MARKED, PLAIN[:1]),
    ],
    ids=["chatml", "chatml-system", "llama3", "mistral", "marked", "prompt"],
)
def test_text_and_ids_are_those_of_transformers(source, messages, folder, theirs):
    """With and without the prompt for an answer, to the character and the id; the control has another template."""
    ours, tokenizer = template(source), load_tokenizer(str(folder / "tokenizer.json"))
    for prompt in (False, True):
        text = theirs.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
        said = ours.render(messages, prompt=prompt).replace("\ufdd0", "").replace("\ufdd1", "")
        assert said == text
        assert said != theirs.apply_chat_template(
            messages, chat_template=CHATML + ".", tokenize=False
        )
        ids = theirs.apply_chat_template(
            messages, chat_template=source, add_generation_prompt=prompt
        )
        ids = ids if isinstance(ids, list) else ids["input_ids"]
        assert tokenizer.encode_chat(text)[0].tolist() == ids


def test_marked_tokens_are_those_of_transformers(folder, theirs):
    """The mask by `{% generation %}` blocks is theirs, and the mask by prefixes has also the ends of turns."""
    # They leave out spaces that begin an answer, which no token of this tokenizer says to be its
    # own.
    messages = tuple({**message, "content": message["content"].lstrip()} for message in SYSTEM)
    found = theirs.apply_chat_template(
        list(messages), chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    masks = {}
    for source in (MARKED, CHATML):
        written = template(source).write(Conversation(messages))
        _, characters = load_tokenizer(str(folder / "tokenizer.json")).encode_chat(written.text)
        masks[source] = sum(
            ((characters[:, 0] < end) & (characters[:, 1] > begin)).astype(int)
            for begin, end, _ in written.parts
        )
    assert masks[MARKED].tolist() == found["assistant_masks"]
    assert 0 < masks[MARKED].sum() == masks[CHATML].sum() - 2
    assert (masks[CHATML] >= masks[MARKED]).all()


def test_tools_and_the_date_are_given_to_the_template(theirs):
    """As `transformers` gives them, with loop controls."""
    now = datetime.now(UTC).replace(tzinfo=None)
    tools = [{"type": "function", "function": {"name": "f<", "parameters": {}}}]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "é"}]},
    ]
    line = {"messages": [*messages, PLAIN[0]], "tools": tools}
    # Until release 5.15 transformers hands a template None, which it prints.
    without_none = [messages[0], {**messages[1], "content": ""}, PLAIN[0]]
    text = theirs.apply_chat_template(
        without_none, tools=tools, chat_template=TOOLS, tokenize=False
    )
    read = read_conversation(line)
    assert template(TOOLS, now=now).render(read.messages, read.tools) == text
