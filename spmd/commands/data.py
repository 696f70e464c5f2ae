"""`spmd data`."""

import dataclasses
import sys
from typing import Literal

import tyro
from rich.console import Console
from rich.text import Text

from spmd.commands.parsing import parse_flags
from spmd.data.chat import ChatConfig, Turns, find_tokenizer_template
from spmd.data.chat_corpus import CONVERSATIONS, PAIRS
from spmd.data.examples import Example, first_examples
from spmd.data.tokenizer import load_tokenizer
from spmd.errors import ConfigError, DataError, Problem, check_fields

_FORMS = {"auto": None, "sft": CONVERSATIONS, "dpo": PAIRS}
_MARKS = ("«", "»")
"""Around trained text, where there are no colours."""


@dataclasses.dataclass(frozen=True)
class DataShowCommand:
    """Show the first conversations of files as they are trained: trained text in green.

    Without a terminal, trained text is between « and ».
    """

    files: tyro.conf.Positional[tuple[str, ...]]
    """Files of conversations or pairs, rows of JSON; also folders and globs."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a tokenizer.json."""
    template: str = ""
    """Chat template; by default, that beside the tokenizer."""
    date: str = ""
    """Date for templates that write today's, such as 2025-01-31."""
    task: Literal["auto", "sft", "dpo"] = "auto"
    """sft: conversations; dpo: pairs of answers; auto: as the first row is."""
    examples: int = 3
    """Number of rows."""
    turns: Turns = "together"
    """each: each turn of the assistant by itself, as with --chat.turns each."""


def run_data(arguments: list[str]) -> int:
    """Run `spmd data show`, and return the exit code."""
    if arguments[:1] in ([], ["-h"], ["--help"]):
        arguments = ["show", "--help"]
    if arguments[0] != "show":
        problem = Problem("spmd data", f"has no {arguments[0]!r}", fix="spmd data show FILE")
        raise ConfigError("Unknown command:", [problem])
    command: DataShowCommand = parse_flags(DataShowCommand, arguments[1:], "spmd data show")
    problems = check_fields(command, {"examples": "at least 1"})
    if not command.files:
        problems.append(Problem("no files", "are given", fix="spmd data show chats.jsonl"))
    if problems:
        raise ConfigError("Nothing can be shown:", problems)
    try:
        found = _examples(command)
    except DataError as error:
        raise _with_own_names(error) from error
    console = Console(highlight=False, soft_wrap=True)
    for example in found:
        console.print(_shown(example, coloured=sys.stdout.isatty()))
    return 0


def _examples(command: DataShowCommand) -> list[Example]:
    """Return the conversations of the first rows."""
    tokenizer = load_tokenizer(command.tokenizer)
    config = ChatConfig(template=command.template, date=command.date, turns=command.turns)
    template = find_tokenizer_template(config, tokenizer, command.tokenizer)
    form = _FORMS[command.task]
    each = command.turns == "each"
    return first_examples(command.files, tokenizer, template, form, command.examples, each=each)


def _with_own_names(error: DataError) -> DataError:
    """Return an error about a config's fields with the flags of this command."""
    problems = list[Problem]()
    for problem in error.problems:
        fix = problem.fix.replace("--data.source ", "").replace("--chat.", "--")
        fix = fix.replace("--data.", "--")
        where = problem.where.replace("data.source: ", "").replace("data.tokenizer", "--tokenizer")
        problems.append(dataclasses.replace(problem, where=where, fix=fix))
    return DataError(error.title, problems)


def _shown(example: Example, *, coloured: bool) -> Text:
    """Return an example with a line about it above."""
    counts = f"{example.tokens:,} tokens, {example.trained:,} of them trained"
    name = f"{example.where} {example.side}".strip()
    text = Text(f"{name}: {counts}\n", style="bold")
    for piece, weight in example.pieces:
        marked = f"{_MARKS[0]}{piece}{_MARKS[1]}"
        if weight == 0:
            text.append(piece, style="not bold")
        elif coloured:
            text.append(piece, style="not bold green")
        else:
            text.append(marked)
        if weight not in (0, 1):
            text.append(f"[weight {weight:g}]", style="not bold dim")
    text.append("\n")
    return text
