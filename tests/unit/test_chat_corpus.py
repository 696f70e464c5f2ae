"""Files of conversations become rows in which only what the assistant says has weight; what cannot be used is said."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from spmd.data.cache_folder import CacheFolder
from spmd.data.chat import ChatConfig, ChatTemplate
from spmd.data.chat_corpus import make_chat_corpus
from spmd.data.corpus import Corpus
from spmd.data.loader import DataConfig, make_rows, split_rows
from spmd.data.packing import PackedDocuments
from spmd.data.tokenizer import ByteTokenizer
from spmd.errors import ConfigError, DataError
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.run.build import abstract_batch
from spmd.run.config import TrainConfig
from spmd.run.open_text import open_text_dataset

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}",
    "a template",
)
SEQUENCE = 24


def line(number: int, answers: int = 1) -> dict:
    turns = [("user", f"ask {number}"), ("assistant", f"say {number}")] * answers
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write(path: Path, lines: list) -> str:
    path.write_text(
        "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    )
    return str(path)


def corpus(tmp_path: Path, lines: list, longer: str = "refuse", **fields) -> Corpus:
    options = {
        "sequence": SEQUENCE,
        "validation": 0.3,
        "cache": CacheFolder(tmp_path / "cache"),
        "config": ChatConfig(longer=longer),
    }
    source = write(tmp_path / "chats.jsonl", lines)
    return make_chat_corpus(
        [source], ByteTokenizer(), fields.pop("template", TEMPLATE), **{**options, **fields}
    )


def said(rows: dict) -> list[str]:
    """The targets that have weight, of each row."""
    found = zip(rows["targets"], rows["weights"], strict=True)
    return [ByteTokenizer().decode(targets[weights > 0]) for targets, weights in found]


def test_weights_of_messages_are_those_of_their_targets(tmp_path):
    """In rows and in the notes; the control is a file without weights, whose mask is one of flags."""
    lines = [line(n) for n in range(9)]
    plain = corpus(tmp_path, lines)
    for each in lines[:4]:
        each["messages"][1]["weight"] = 0.5
    found = corpus(tmp_path, lines)
    assert plain.train_mask.dtype == bool
    assert found.train_mask.dtype == np.float32
    total = 0.0
    trained = 0
    for rows in split_rows(DataConfig(sequence=SEQUENCE), found):
        weights = rows.rows(np.arange(len(rows)))["weights"]
        total += weights.sum()
        trained += np.count_nonzero(weights)
    assert (trained, total) == (9 * len("say 0\n"), 7 * len("say 0\n"))
    assert "4 messages have weights other than 0 and 1" in found.notes
    reopened = corpus(tmp_path, lines)
    assert np.array_equal(reopened.train_mask, found.train_mask)


def test_each_turn_is_a_text_by_itself(tmp_path):
    """Of one split, with what precedes it; each has room in a sequence, which all together have not."""
    lines = [line(n, answers=3) for n in range(9)]
    with pytest.raises(DataError, match="tokens > "):
        corpus(tmp_path, lines, sequence=40)
    config = ChatConfig(turns="each")
    found = corpus(tmp_path, lines, sequence=60, config=config)
    assert found.documents == 9
    assert len(found.train_ends) + len(found.validation_ends) == 27
    assert "each of 27 turns of the assistant is a text by itself" in found.notes
    for rows in split_rows(DataConfig(sequence=60, packing="padded"), found):
        for answer in said(rows.rows(np.arange(len(rows)))):
            assert answer.count("say") == 1
    with pytest.raises(ConfigError, match=r"chat\.turns"):
        TrainConfig(model=PRESETS["test"], rules=LLAMA, task="dpo", chat=config)


@pytest.mark.parametrize("packing", ["auto", "padded"])
def test_only_what_the_assistant_says_has_weight(tmp_path, packing):
    """In both packings, each answer once; the control without a mask has all tokens but the first of each."""
    found = corpus(tmp_path, [line(n) for n in range(9)])
    data = DataConfig(sequence=SEQUENCE, packing=packing)
    answers = []
    for rows in split_rows(data, found):
        batch = rows.rows(np.arange(len(rows)))
        answers += "".join(said(batch)).splitlines()
        assert ("segments" in batch) == (packing == "auto")
        assert packing == "auto" or len(rows) in (len(found.train_ends), len(found.validation_ends))
    assert sorted(answers) == [f"say {n}" for n in range(9)]
    assert found.documents == 9
    assert len(found.validation_ends) > 0
    every = make_rows(dataclasses.replace(data, packing="documents"), found.train, found.train_ends)
    assert every.rows(np.arange(len(every)))["weights"].sum() == len(found.train) - len(
        found.train_ends
    )


def test_text_may_be_padded_too():
    """A row has the start of its document; a document that is longer has several."""
    packed = PackedDocuments(np.arange(9), np.array([3, 9]), sequence=4, alone=True)
    rows = packed.rows(np.arange(len(packed)))
    assert rows["tokens"].tolist() == [[0, 1, 0, 0], [3, 4, 5, 6], [7, 0, 0, 0]]
    assert rows["targets"].tolist() == [[1, 2, 0, 0], [4, 5, 6, 7], [8, 0, 0, 0]]
    assert rows["weights"].sum() == 7
    assert packed.wasted == pytest.approx(5 / 12)


def test_longer_conversations_are_refused_dropped_or_truncated(tmp_path):
    """As the config says, with the count; one in which the assistant then says nothing is dropped, and counted."""
    long = {"prompt": "x" * 99, "completion": "late"}
    lines = [line(1), line(2, answers=3), long, line(3)]
    with pytest.raises(DataError) as caught:
        corpus(tmp_path, lines)
    assert [problem.where[-2:] for problem in caught.value.problems] == [":2", ":3"]
    assert "it has 48 tokens > data.sequence + 1 = 25" in str(caught.value)
    assert "--data.sequence 47, or --chat.longer drop or truncate" in str(caught.value)
    dropped, cut = (corpus(tmp_path, lines, longer) for longer in ("drop", "truncate"))
    assert (dropped.documents, cut.documents) == (2, 3)
    assert dropped.notes[1] == "longer than 24 tokens: 2 were dropped"
    assert cut.notes[1].startswith(
        "longer than 24 tokens: 1 were truncated and 1 were dropped since the assistant"
    )
    lengths = np.concatenate(
        [np.diff(ends, prepend=0) for ends in (cut.train_ends, cut.validation_ends)]
    )
    assert sorted(lengths) == [16, 16, 25]
    with pytest.raises(DataError, match="holds none that is short enough"):
        corpus(tmp_path, [long], "drop")


def test_everything_that_is_wrong_is_said_with_its_line(tmp_path):
    """Up to ten lines of a file, and how many more."""
    lines = [
        "",
        "no JSON",
        line(1),
        {"messages": []},
        {"prompt": "x", "completion": " "},
        '{"messages": "\\ud800"}',
    ]
    with pytest.raises(DataError) as caught:
        corpus(tmp_path, [*lines, *[3] * 9])
    where = [
        problem.where.removeprefix(str(tmp_path / "chats.jsonl"))
        for problem in caught.value.problems
    ]
    assert sorted(where) == sorted(["", ":2", ":4", ":5", *(f":{n}" for n in range(6, 13))])
    assert "has 3 more problems like these" in str(caught.value)
    refusing = ChatTemplate("{{ raise_exception('a system message comes first') }}", "x")
    with pytest.raises(
        DataError, match=r"chats\.jsonl:1: cannot be used\n.*refuses: a system message comes first"
    ):
        corpus(tmp_path, [line(1)], template=refusing)
    silent = ChatTemplate(
        "{% for m in messages %}{{ m.role }}{% generation %}{% endgeneration %}{% endfor %}", "x"
    )
    with pytest.raises(
        DataError, match=r"nothing of it is trained: its \{% generation %\} blocks have no tokens"
    ):
        corpus(tmp_path, [line(1)], template=silent)
    half = {
        "messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "x"}]
    }
    with pytest.raises(DataError, match="surrogates not allowed"):
        corpus(tmp_path, [half])


def test_files_that_hold_no_conversations_are_said(tmp_path):
    """Text, an empty file, and none."""
    (tmp_path / "text.md").write_text("text")
    for source, says in (("text.md", "has no rows of JSON"), ("none.jsonl", "does not exist")):
        with pytest.raises(DataError, match=says):
            make_chat_corpus(
                [str(tmp_path / source)],
                ByteTokenizer(),
                TEMPLATE,
                config=ChatConfig(),
                sequence=8,
                validation=0.1,
                cache=CacheFolder(tmp_path),
            )
    with pytest.raises(DataError, match="holds no conversation"):
        corpus(tmp_path, ["", " "])


def test_tokens_are_cached_under_all_that_they_depend_on(tmp_path, monkeypatch):
    """The second time nothing is encoded; another template, length, way or file is another corpus; damage is mended."""
    lines = [line(n) for n in range(4)]
    first = corpus(tmp_path, lines)
    with monkeypatch.context() as patched:
        patched.setattr(ByteTokenizer, "encode_chat", lambda *_: pytest.fail("encoded again"))
        again = corpus(tmp_path, lines)
    assert (again.fingerprint, again.notes) == (first.fingerprint, first.notes)
    np.testing.assert_array_equal(again.train_mask, first.train_mask)
    other = dataclasses.replace(TEMPLATE, tokens={"eos_token": "x"})
    others = [
        corpus(tmp_path, lines, template=other),
        corpus(tmp_path, lines, sequence=99),
        corpus(tmp_path, lines, "drop"),
        corpus(tmp_path, lines[:3]),
    ]
    assert len({first.fingerprint, *(each.fingerprint for each in others)}) == 5
    (tmp_path / "cache" / first.fingerprint / "train_mask.npy").unlink()
    np.testing.assert_array_equal(corpus(tmp_path, lines).train_mask, first.train_mask)


@pytest.mark.parametrize("damage", ["shorter", "ids", "mask", "record"])
def test_a_cache_of_other_tokens_is_made_again(damage, tmp_path):
    """With a line that says why; control: an intact cache is used without one."""
    lines = [line(n) for n in range(4)]
    first = corpus(tmp_path, lines)
    place = tmp_path / "cache" / first.fingerprint
    name = {"mask": "train_mask"}.get(damage, "train")
    expected = np.array(getattr(first, name))
    if damage == "record":
        (place / "conversations.json").write_text("[" * 200_000)
    else:
        changed = expected[:-1]
        if damage == "ids":
            changed = np.where(expected == expected[5], 999, expected).astype(expected.dtype)
        elif damage == "mask":
            changed = ~expected
        (place / f"{name}.npy").unlink()
        np.save(place / f"{name}.npy", changed)
    again = corpus(tmp_path, lines)
    assert f"the cached tokens in {place} were damaged" in again.notes[0]
    np.testing.assert_array_equal(getattr(again, name), expected)
    assert corpus(tmp_path, lines).notes == first.notes == again.notes[1:]


def config(tmp_path: Path, **fields) -> TrainConfig:
    source = write(tmp_path / "two.jsonl", [line(1), line(2)])
    (tmp_path / "chat.jinja").write_text(TEMPLATE.source)
    data = DataConfig(source=(source,), sequence=SEQUENCE, batch=2, cache=str(tmp_path / "cache"))
    given = {
        "task": "sft",
        "data": data,
        "chat": ChatConfig(template=str(tmp_path / "chat.jinja")),
        **fields,
    }
    return TrainConfig(model=dataclasses.replace(PRESETS["test"], vocab=256), rules=LLAMA, **given)


def test_a_config_trains_conversations(tmp_path):
    """Its batches have segments where they are packed; one conversation cannot be split."""
    (only,) = open_text_dataset(config(tmp_path)).sets
    found = only.text
    assert isinstance(found, Corpus)
    assert only.describe().startswith("2 conversations, ")
    assert (found.documents, len(found.validation_ends)) == (2, 1)
    assert "segments" in abstract_batch(config(tmp_path))
    padded = DataConfig(packing="padded")
    assert "segments" not in abstract_batch(config(tmp_path, data=padded))
    assert "segments" not in abstract_batch(config(tmp_path, task="pretrain", chat=ChatConfig()))
    one = dataclasses.replace(
        config(tmp_path).data, source=(write(tmp_path / "one.jsonl", [line(1)]),)
    )
    with pytest.raises(DataError, match="holds one conversation"):
        open_text_dataset(config(tmp_path, data=one))


def test_configs_that_cannot_be_are_refused(tmp_path):
    """Windows of conversations, conversations of text, bytes without a template, and bytes of a model with tokens."""
    with pytest.raises(ConfigError, match=r"data\.packing: is windows"):
        config(tmp_path, data=DataConfig(packing="windows"))
    with pytest.raises(ConfigError, match=r"data\.streaming: is for text"):
        config(tmp_path, data=DataConfig(streaming=True))
    with pytest.raises(ConfigError, match="--task sft"):
        config(tmp_path, task="pretrain")
    with pytest.raises(ConfigError, match="task: is 'chat'"):
        config(tmp_path, task="chat")
    with pytest.raises(DataError, match=r"has no chat template\n.*it is bytes"):
        open_text_dataset(config(tmp_path, chat=ChatConfig()))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has its own\n.*--data\.tokenizer .*tokenizer\.json"):
        open_text_dataset(config(tmp_path, init=str(tmp_path)))


def test_marked_turns_and_fields_that_nobody_reads_are_said(tmp_path):
    """Once, with counts, from a cache too; control: a template that reads a field, and lines that have none."""
    lines = [line(n, answers=2) for n in range(4)]
    for each in lines:
        each |= {"id": 3, "tools": None}
        each["messages"][1] |= {"weight": 0, "name": "a", "thinking": "so"}
    lines[0]["messages"][0]["name"] = "b"
    for _ in range(2):
        found = corpus(tmp_path, lines, sequence=99)
        assert found.notes[1:] == (
            "4 messages are marked not to be trained (weight, train, training, loss, trainable)",
            "fields that the chat template does not read: name (5 messages), thinking (4 messages)",
            "fields that spmd does not read: id (4 lines)",
        )
    asks = "{% for m in messages %}{% if m.thinking %}{% endif %}{% endfor %}"
    reading = ChatTemplate(asks + TEMPLATE.source, "another")
    assert (
        corpus(tmp_path, lines, sequence=99, template=reading)
        .notes[2]
        .endswith("read: name (5 messages)")
    )
    assert len(corpus(tmp_path, [line(n) for n in range(4)]).notes) == 1
