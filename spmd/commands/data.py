"""`spmd data`."""

import dataclasses
import sys
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.text import Text

from spmd.commands.parsing import parse_flags
from spmd.data.chat import ChatConfig, find_template
from spmd.data.chat_corpus import CONVERSATIONS, PAIRS
from spmd.data.examples import Example, first_examples
from spmd.data.tokenizer import ByteTokenizer, load_tokenizer
from spmd.errors import ConfigError, DataError, Problem, check_fields, did_you_mean
from spmd.storage.download import is_side_file, local_path

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


def run_data(arguments: list[str]) -> int:
    """Run `spmd data show`, and return the exit code."""
    if arguments[:1] != ["show"]:
        given = arguments[0] if arguments else "nothing"
        problem = Problem("spmd data", f"has no {given!r}", fix=did_you_mean(given, ("show",)))
        raise ConfigError("Unknown command:", [problem])
    command: DataShowCommand = parse_flags(DataShowCommand, arguments[1:], "spmd data show")
    problems = check_fields(command, {"examples": "at least 1"})
    if not command.files:
        problems.append(Problem("files", "there are none", fix="spmd data show chats.jsonl"))
    if problems:
        raise ConfigError("Nothing can be shown:", problems)
    tokenizer = load_tokenizer(command.tokenizer)
    config = ChatConfig(template=command.template, date=command.date)
    folders = list[Path]()
    special = dict[str, str]()
    if isinstance(tokenizer, ByteTokenizer):
        special = {"eos_token": tokenizer.decode([tokenizer.eos])}
    else:
        folders = [local_path(command.tokenizer, is_side_file).parent]
    try:
        template = find_template(config, folders, special)
    except DataError as error:
        raise _with_own_flags(error) from error
    form = _FORMS[command.task]
    found = first_examples(command.files, tokenizer, template, form, command.examples)
    console = Console(highlight=False, soft_wrap=True)
    for example in found:
        console.print(_shown(example, coloured=sys.stdout.isatty()))
    return 0


def _with_own_flags(error: DataError) -> DataError:
    """Return an error about a config's fields with the flags of this command in its fixes."""
    problems = list[Problem]()
    for problem in error.problems:
        fix = problem.fix.replace("--chat.", "--").replace("--data.", "--")
        problems.append(dataclasses.replace(problem, fix=fix))
    return DataError(error.title, problems)


def _shown(example: Example, *, coloured: bool) -> Text:
    """Return an example with a line about it above."""
    counts = f"{example.tokens:,} tokens, {example.trained:,} of them trained"
    name = f"{example.where} {example.side}".strip()
    text = Text(f"{name}: {counts}\n", style="bold")
    for piece, is_trained in example.pieces:
        if not is_trained:
            text.append(piece, style="not bold")
        elif coloured:
            text.append(piece, style="not bold green")
        else:
            text.append(piece.join(_MARKS))
    text.append("\n")
    return text
