"""Old names and phrases stay out of code, docs and messages: each has a standard term today.

These words of the table are not in the lists, because they are ordinary English or terms of others:
`added`, `agree`, `alone`, `aligned`, `apart`, `at`, `attention`, `balanced`, `blame`, `cells`,
`cluster`, `collecting`, `deferred`, `either`, `evidence`, `exchange`, `faults`, `fields`, `frozen`,
`groups`, `group`, `is_kept`, `keep`, `kept`, `look`, `online`, `operands`, `order`, `part`,
`pass_on`, `programs`, `put`, `recorded`, `result`, `room`, `rule`, `seal`, `see`, `signs`,
`staged`, `started`, `threaded`, `traced`, `view`, `weight`, `whole`, `within`. `CHANGELOG.md` is
history and is not read. `usual_norm` is a path in checkpoints, and `exchange_once` a field in records of
runs, which are read for good.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import spmd
from tests.architecture.test_no_traces import ROOT, repository_files

IDENTIFIERS = {
    "as_annotated",
    "as_taken",
    "at_precision",
    "bad_steps",
    "broken_promises",
    "by_heads",
    "check_seal",
    "checkpoint_core",
    "checkpoint_layer",
    "choose_exchange",
    "collect_layers",
    "compressed_bytes",
    "cut_large",
    "describe_start",
    "FaultsConfig",
    "find_promises",
    "give_back",
    "gradient_view",
    "is_balanced",
    "left_out",
    "local_param",
    "LocalParam",
    "LoraConfig",
    "loss_chunk",
    "low_rank",
    "MagnitudeHistory",
    "make_cuts",
    "make_program",
    "manual_over",
    "MatmulRecipe",
    "model_api",
    "nothing_seen",
    "open_training_text",
    "rehearse",
    "RunDefinition",
    "RunFolder",
    "scope_of",
    "sent_bytes",
    "set_aside",
    "show_waiting",
    "split_like",
    "stands_for",
    "stored_form",
    "takes_any_order",
    "takes_one_token",
    "through_layers",
    "TrainingText",
    "uncombined",
    "Unembedded",
    "UNSEEN",
    "written_as",
}
"""Names that are no English words: found anywhere in a file."""
CLASSES = {
    "Adapted",
    "Answer",
    "Asked",
    "Blocks",
    "Cut",
    "Facts",
    "Found",
    "Hosted",
    "How",
    "Instruments",
    "Keep",
    "Leaf",
    "Ledger",
    "Name",
    "Order",
    "Outcome",
    "Pieces",
    "Position",
    "Promise",
    "Published",
    "Ragged",
    "Reached",
    "Recipe",
    "Reloaded",
    "Rows",
    "Scope",
    "Shares",
    "Spread",
    "Staged",
    "Visit",
    "Weight",
}
"""Names of classes that are English words too: found where code of the package defines or imports them."""
PHRASES = {
    "at turn",
    "BROKEN PROMISE",
    "goes on after",
    "going on after",
    "is no verb",
    "left out",
    "nobody decided",
    "nobody takes",
    "nothing to act on",
    "of whom",
    "stage behind",
    "There is no such",
    "This is no",
    "this room",
    "told to go",
    "trained uphill",
    "what became of",
}
MODULE_NAMES = {
    "spmd.adapted",
    "spmd.annotate",
    "spmd.config",
    "spmd.corpus",
    "spmd.flax",
    "spmd.foresight",
    "spmd.logical",
    "spmd.loss",
    "spmd.mesh",
    "spmd.model",
    "spmd.moments",
    "spmd.parallel",
    "spmd.per_layer",
    "spmd.remat",
    "spmd.rules",
    "spmd.search_tables",
    "spmd.tokenizer",
    "spmd.xla_flags",
}
"""Modules by their earlier names, but for those that are a folder's today."""
PUBLIC = {f"spmd.{name}" for name in spmd.__all__}


def one_of(words: Iterable[str]) -> str:
    """A pattern for any of these words; a space is also the end of a line, of a comment too."""
    return (
        "(?:" + "|".join(re.escape(word).replace(r"\ ", r"[\s#]+") for word in sorted(words)) + ")"
    )


WORDS = re.compile(
    rf"(?<![\w-]){one_of(IDENTIFIERS)}(?!\w)|\b{one_of(PHRASES)}\b|(?<!\w){one_of(set(MODULE_NAMES) - PUBLIC)}(?!\w)"
)
NOT_READ = ("CHANGELOG.md", "tests/architecture/test_words.py", "tests/durations.txt")
"""History, and the earlier names."""


def old_words(text: str) -> list[str]:
    """What a text has of the old words, as `line: word`."""
    return [
        f"{text.count(chr(10), 0, m.start()) + 1}: {' '.join(m.group().split())}"
        for m in WORDS.finditer(text)
    ]


def old_classes(source: str) -> list[str]:
    """Old names of classes that Python source defines or imports."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "spmd":
            names += [alias.name for alias in node.names]
    return sorted(set(names) & set(CLASSES))


def texts() -> Iterator[tuple[str, str]]:
    """Path → text of every file of code, documentation or settings."""
    for path in repository_files():
        name = path.relative_to(ROOT).as_posix()
        if name not in NOT_READ and path.suffix in (".py", ".md", ".toml", ".yml", ".sh", ".txt"):
            yield name, path.read_text(encoding="utf-8")


def test_no_old_words() -> None:
    """No identifier, phrase or module of the lists is in any file."""
    found = [f"{name}:{word}" for name, text in texts() for word in old_words(text)]
    assert not found, "\n".join(found)


def test_no_old_classes() -> None:
    """No class outside of the tests has an old name."""
    python = [
        (name, text)
        for name, text in texts()
        if name.endswith(".py") and not name.startswith("tests/")
    ]
    assert {name: classes for name, text in python if (classes := old_classes(text))} == {}
    assert len(python) > 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = as_taken(p)\nUNSEEN = 0", ["1: as_taken", "2: UNSEEN"]),
        ("A run that is told to\n    go saves.", ["1: told to go"]),
        ("# a batch is left\n# out", None),
        ("see `spmd.rules` and spmd/sharding/rules.py", ["1: spmd.rules"]),
        ("spmd.run.job_files is kept at a part; as_taken_by, spmd.annotate, spmd.optim", []),
        ("low-rank adapters; test_bad_steps.py", []),
    ],
)
def test_control_old_words(text: str, words: list[str] | None) -> None:
    """Each kind is found by its line, also over the end of a line or of a comment; longer names are others."""
    assert bool(old_words(text)) if words is None else old_words(text) == words, old_words(text)


def test_control_old_classes() -> None:
    """Definitions and imports of our own are found; words in a text, and names of others, are not."""
    assert old_classes("class Leaf:\n    pass\nfrom spmd.run.build import Recipe") == [
        "Leaf",
        "Recipe",
    ]
    assert old_classes('"""Leaf."""\nfrom ast import Name\nx = ast.Name()') == []


def test_files_are_read() -> None:
    """The documentation, the package and the tests; what is not read exists."""
    names = {name for name, _ in texts()}
    assert {
        "README.md",
        "docs/glossary.md",
        "spmd/run/train.py",
        "models/llama.py",
        "pyproject.toml",
    } <= names
    assert all(Path(ROOT / name).exists() for name in NOT_READ)
