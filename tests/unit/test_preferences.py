"""Files of preferred and other answers become rows of pairs; what cannot be used is said, all at once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd.data.cache_folder import CacheFolder
from spmd.data.chat import BadConversationError, ChatConfig, ChatTemplate
from spmd.data.chat_corpus import PAIRS, make_chat_corpus
from spmd.data.corpus import Corpus
from spmd.data.loader import DataConfig, corpus_rows
from spmd.data.log_probs import LogProbs
from spmd.data.packed_pairs import PackedPairs
from spmd.data.preferences import read_pair
from spmd.data.tokenizer import ByteTokenizer
from spmd.errors import ConfigError, DataError
from spmd.models.llama import PRESETS
from spmd.partition_rules.llama import LLAMA
from spmd.run.build import abstract_batch
from spmd.run.config import TrainConfig
from spmd.run.open_text import open_text_dataset
from spmd.settings.dpo import DPOConfig, most_pairs

TEMPLATE = ChatTemplate(
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}",
    "a template",
)
USER = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}
NO = {"role": "assistant", "content": "no"}
MORE = {"role": "user", "content": "more"}


def contents(line: Any) -> list[list[tuple[str, str, bool]]]:
    """Role, text and whether it is trained, of each message of both conversations."""
    pair = read_pair(line)
    return [
        [
            (m["role"], m["content"], m["role"] == "assistant" and "train" not in m)
            for m in c.messages
        ]
        for c in pair
    ]


SIMPLE = [
    [("user", "hi", False), ("assistant", "yes", True)],
    [("user", "hi", False), ("assistant", "no", True)],
]


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"question": "hi", "chosen": "yes", "rejected": "no", "system": ""},
        {"instruction": "hi", "chosen": YES, "rejected": NO},
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": "hi", "chosen": [USER, YES], "rejected": [USER, NO]},
        {"chosen": [USER, YES], "rejected": [USER, NO], "score_chosen": 8.5},
        {
            "conversations": [{"from": "human", "value": "hi"}],
            "chosen": {"from": "gpt", "value": "yes"},
            "rejected": {"from": "gpt", "value": "no"},
        },
        {
            "chosen": "\n\nHuman: hi\n\nAssistant: yes",
            "rejected": "\n\nHuman: hi\n\nAssistant: no",
        },
        {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": "yes", "rejected": "no"},
        {
            "prompt": "Human: hi",
            "chosen": "Human: hi\n\nAssistant: yes",
            "rejected": "Human: hi\n\nAssistant: no",
        },
        {"prompt": "hi", "messages": [USER, YES], "chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": [], "question": "hi", "chosen": "yes", "rejected": "no"},
        {"input": "hi", "chosen": "yes", "rejected": "no"},
    ],
    ids=[
        *("texts", "a question", "messages", "lists", "whole and prompt", "whole", "ShareGPT"),
        *("HH", "HH prompt", "HH both", "UltraFeedback", "an empty prompt", "Orca"),
    ],
)
def test_every_form_is_the_same_pair(line: dict[str, Any]) -> None:
    assert contents(line) == SIMPLE


def test_only_what_differs_is_trained() -> None:
    """Earlier turns of the assistant belong to the prompt, whatever they are marked as; later ones are trained."""
    start = [USER, {**YES, "weight": 1}, MORE]
    line = {"chosen": [*start, YES, MORE, NO], "rejected": [*start, NO]}
    chosen, rejected = contents(line)
    assert [trained for _, _, trained in chosen] == [False, False, False, True, False, True]
    assert [trained for _, _, trained in rejected] == [False, False, False, True]


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"conversations": [USER], "chosen": YES, "rejected": NO},
        {"prompt": "hi", "chosen": [USER, YES], "rejected": [USER, NO]},
    ],
)
def test_a_system_message_comes_first(line: dict[str, Any]) -> None:
    """In every form, unless the conversation has its own."""
    system = ("system", "Be brief.", False)
    assert contents({"system": "Be brief.", **line}) == [[system, *side] for side in SIMPLE]
    own = {"role": "system", "content": "Be long."}
    given = {"system": "Be brief.", "chosen": [own, USER, YES], "rejected": [own, USER, NO]}
    assert contents(given)[0][0] == ("system", "Be long.", False)


LONG = [USER, YES, MORE]


@pytest.mark.parametrize(
    ("prompt", "chosen", "expected"),
    [
        (LONG, [MORE, NO], [*LONG, NO]),
        ([USER, YES, USER], [USER, NO], [USER, YES, USER, NO]),
        ([YES, USER], [YES, USER, NO], [YES, USER, NO]),
        (LONG, [USER, NO], [*LONG, USER, NO]),
    ],
    ids=["the last question again", "a question twice", "a greeting", "another question"],
)
def test_a_prompt_is_joined_with_its_answer_once(prompt: Any, chosen: Any, expected: Any) -> None:
    """By the longest end of the prompt with which the answer begins."""
    other = {"role": "assistant", "content": "other"}
    found, _ = read_pair({"prompt": prompt, "chosen": chosen, "rejected": [*chosen[:-1], other]})
    assert [message["content"] for message in found.messages] == [m["content"] for m in expected]


def test_an_instruction_has_its_input_behind_it() -> None:
    line = {"instruction": "Add.", "input": "1, 2", "chosen": "3", "rejected": "4"}
    assert contents(line)[0][0] == ("user", "Add.\n1, 2", False)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "the line is not an object"),
        ({"prompt": "hi", "chosen": "yes"}, 'no "rejected" answer; it has prompt, chosen'),
        ({"prompt": "hi"}, 'no "chosen" answer and no "rejected" answer; it has prompt'),
        (
            {"prompt": "hi", "chosen": 3, "rejected": "no"},
            '"chosen" is neither a text nor messages',
        ),
        ({"prompt": "hi", "chosen": [], "rejected": "no"}, '"chosen" has no message'),
        (
            {"prompt": 7, "chosen": "", "rejected": "no"},
            'prompt message 1 has no text under "content"; chosen message 1, the assistant\'s, is empty',
        ),
        (
            {"chosen": [USER, YES], "rejected": [USER, MORE]},
            '"rejected" has no message of the assistant',
        ),
        (
            {"chosen": "yes", "rejected": "no"},
            'the answers have no prompt in common: no "prompt", "question", "instruction", "input", "messages", '
            '"conversations", and they do not begin with the same question',
        ),
        (
            {"prompt": [USER, YES], "chosen": "a", "rejected": "b"},
            "the prompt ends with a message of the assistant",
        ),
        (
            {"prompt": "hi", "chosen": [{**YES, "train": False}], "rejected": "no"},
            'every message of "chosen" is marked not to be trained',
        ),
    ],
)
def test_what_cannot_be_used_is_said(line: Any, said: str) -> None:
    with pytest.raises(BadConversationError) as caught:
        read_pair(line)
    assert str(caught.value) == said


def corpus(folder: Path, lines: list[Any], **fields: Any) -> Corpus:
    source = folder / "pairs.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    options: dict[str, Any] = {
        "sequence": 64,
        "validation": 0.3,
        "cache": CacheFolder(folder / "cache"),
        "config": ChatConfig(longer=fields.pop("longer", "refuse")),
        "form": PAIRS,
        "with_reference": True,
    }
    return make_chat_corpus([str(source)], ByteTokenizer(), TEMPLATE, **{**options, **fields})


def line(number: int, chosen: str = "yes", rejected: str = "nope") -> dict[str, str]:
    return {"prompt": f"ask {number}", "chosen": chosen, "rejected": rejected}


def test_answers_of_a_pair_are_in_one_row(tmp_path: Path) -> None:
    """The weights are of both answers, and say which pair and which side they are of."""
    found = corpus(tmp_path, [line(n) for n in range(10)])
    assert found.documents == 10
    assert len(found.train_ends) + len(found.validation_ends) == 20
    rows = corpus_rows(DataConfig(sequence=64), found, "train")
    assert isinstance(rows, PackedPairs)
    assert rows.reference is not None
    rows.reference.fill(np.arange(len(found.train)), np.arange(len(found.train)))
    read = rows.rows(np.arange(len(rows)))
    tokenizer = ByteTokenizer()
    for row in range(len(rows)):
        for number in range(1, int(read["pairs"][row].max()) + 1):
            for sign, answer in ((1, "yes\n"), (-1, "nope\n")):
                own = (read["pairs"][row] == sign * number) & (read["weights"][row] > 0)
                assert tokenizer.decode(read["targets"][row][own]) == answer
                places = read["reference"][row][own].astype(int)
                assert tokenizer.decode(found.train[places]) == answer
    assert read["pairs"].max() == 2
    assert (read["reference"][read["weights"] == 0] == 0).all()
    assert "reference" not in replace(rows, reference=None).rows(np.arange(1))


def test_packing_keeps_pairs_whole_and_rows_within_the_limit() -> None:
    """Also with more short pairs than a row may have; alone, each has a row."""
    lengths = np.array([2, 2] * 9 + [20, 11] * 2)
    tokens = np.arange(lengths.sum())
    mask = np.ones(len(tokens), bool)
    rows = PackedPairs(tokens, np.cumsum(lengths), 64, mask)
    found = rows.rows(np.arange(len(rows)))
    assert found["pairs"].max() == most_pairs(64) == 2
    assert np.abs(found["pairs"]).max(axis=1).min() >= 1
    trained = found["targets"][found["weights"] > 0]
    assert sorted(trained.tolist()) == sorted(set(range(len(tokens))) - {0, *np.cumsum(lengths)})
    alone = PackedPairs(tokens, np.cumsum(lengths), 64, mask, alone=True)
    assert len(alone) == 11
    with pytest.raises(DataError, match="29 targets > 28"):
        PackedPairs(tokens, np.cumsum(lengths), 28, mask)


def test_long_pairs_are_refused_dropped_or_truncated(tmp_path: Path) -> None:
    """The longer answer loses more; a pair without trained tokens is dropped, and all of it is said."""
    lines = [line(0), line(1), line(2, "y" * 80, "n" * 9), line(3, "y" * 80, "n" * 80)]
    with pytest.raises(DataError) as caught:
        corpus(tmp_path, lines)
    assert "its answers have 90 + 19 = 109 targets > data.sequence = 64" in str(caught.value)
    assert "--data.sequence 109, or --chat.longer drop or truncate" in str(caught.value)
    dropped = corpus(tmp_path, lines, longer="drop")
    assert dropped.documents == 2
    assert "longer than 64 tokens: 2 were dropped" in dropped.notes
    truncated = corpus(tmp_path, lines, longer="truncate", validation=0.01)
    ends = [*truncated.train_ends.tolist(), *truncated.validation_ends.tolist()]
    lengths = set(np.diff([0, *truncated.train_ends.tolist()]).tolist())
    assert {46, 20, 33} <= lengths | set(np.diff([0, *truncated.validation_ends.tolist()]).tolist())
    assert len(ends) == 8


def test_equal_answers_are_dropped_and_counted(tmp_path: Path) -> None:
    found = corpus(tmp_path, [line(0), line(1), line(2, "same", "same")])
    assert found.documents == 2
    assert "dropped, since both answers are equal: 1" in found.notes
    again = corpus(tmp_path, [line(0), line(1), line(2, "same", "same")])
    assert again.notes == found.notes
    with pytest.raises(DataError, match="holds no pair of answers"):
        corpus(tmp_path, [line(0, "same", "same")])


def test_log_probabilities_come_back_from_their_file(tmp_path: Path) -> None:
    values = LogProbs("train", 4)
    values.fill(np.array([3, 1]), np.array([-1.5, -2.5], np.float32))
    values.keep_in(tmp_path / "reference")
    values.save()
    again = LogProbs("train", 4)
    again.keep_in(tmp_path / "reference")
    np.testing.assert_array_equal(again.values, values.values)
    shorter = LogProbs("train", 3)
    shorter.keep_in(tmp_path / "reference")
    with pytest.raises(DataError, match="is of other data"):
        assert shorter.values.size
    damaged = bytearray(values.path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    values.path.write_bytes(bytes(damaged))
    third = LogProbs("train", 4)
    third.keep_in(tmp_path / "reference")
    with pytest.raises(DataError, match="cannot be read"):
        assert third.values.size
    with pytest.raises(DataError, match="were not computed"):
        assert LogProbs("train", 4).values.size


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"beta": -1.0}, "dpo.beta"),
        ({"margin": 0.3}, "dpo has no margin"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "ipo has no label smoothing"),
        ({"label_smoothing": 0.5}, "dpo.label_smoothing"),
        ({"loss": "kto"}, "dpo.loss"),
    ],
)
def test_settings_without_an_effect_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DPOConfig(**fields)


def config(folder: Path, **fields: Any) -> TrainConfig:
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(line(n)) for n in range(6)))
    (folder / "t.jinja").write_text(TEMPLATE.source)
    data = DataConfig(
        source=(str(folder / "pairs.jsonl"),), cache=str(folder / "cache"), sequence=64, **fields
    )
    return TrainConfig(
        model=replace(PRESETS["test"], vocab=256),
        rules=LLAMA,
        data=data,
        task="dpo",
        chat=ChatConfig(template=str(folder / "t.jinja")),
    )


def test_batches_have_the_shapes_of_the_config(tmp_path: Path) -> None:
    """With a reference model and without; the text is of pairs."""
    whole = config(tmp_path)
    text = open_text_dataset(whole)
    assert "6 pairs of answers" in text.describe(1)
    part = text.sets[0].train
    assert isinstance(part, PackedPairs)
    assert part.reference is not None
    part.reference.fill(np.arange(part.reference.length), 0.0)
    found = {name: x.dtype for name, x in part.rows(np.arange(1)).items()}
    assert found == {name: x.dtype for name, x in abstract_batch(whole).items()}
    without = replace(whole, dpo=DPOConfig(loss="simpo"))
    free = open_text_dataset(without).sets[0].train
    assert isinstance(free, PackedPairs)
    assert set(free.rows(np.arange(1))) == set(abstract_batch(without))
    with pytest.raises(ConfigError, match="windows, which cut conversations anywhere"):
        config(tmp_path, packing="windows")
    with pytest.raises(ConfigError, match="is for pairs of answers, and task is sft"):
        replace(whole, task="sft", dpo=DPOConfig(beta=0.2))
