"""First rows of conversations or pairs as text, with the trained parts."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from spmd.data.chat import ChatTemplate, Conversation, each_turn
from spmd.data.chat_corpus import CONVERSATIONS, PAIRS, RowForm, find_rows, trained_tokens
from spmd.data.documents import FileProblems
from spmd.data.preferences import SIDES
from spmd.data.text_files import JsonRows
from spmd.data.tokenizer import Tokenizer
from spmd.errors import DataError, Problem

_TITLE = "invalid conversations:"


@dataclasses.dataclass(frozen=True)
class Example:
    """A conversation of a row.

    Attributes:
        where: File and row.
        side: `chosen` or `rejected` of a pair; empty of a conversation.
        pieces: Text and the weight of its tokens in the loss, in order.
        tokens: Number of tokens.
        trained: Number of trained targets.
    """

    where: str
    side: str
    pieces: tuple[tuple[str, float], ...]
    tokens: int
    trained: int


def first_examples(
    source: Iterable[str],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    form: RowForm | None,
    count: int,
    *,
    each: bool = False,
) -> list[Example]:
    """Return the conversations of the first rows; a form of None is told by the first row.

    Args:
        each: Whether each turn of the assistant in a conversation is one by itself.

    Raises:
        DataError: A row before them cannot be used, or there is none.
    """
    found = list[Example]()
    rows = 0
    for file in find_rows(source):
        problems = FileProblems(file)
        reader = JsonRows(file.path, lambda row: row, "cannot be read", problems.report)
        with problems.of_reading():
            for part, row in itertools.islice(reader.read(file.format), count - rows):
                form = form or _form_of(row)
                if each and form is not CONVERSATIONS:
                    what = "is each, and the rows are pairs of answers"
                    raise DataError(_TITLE, [Problem("turns", what, fix="no --turns")])
                found += _of_row(row, f"{file.path}{part}", form, tokenizer, template, each=each)
                rows += 1
        if problems.all():
            raise DataError(_TITLE, problems.all())
        if rows == count:
            return found
    if not found:
        raise DataError(_TITLE, [Problem("the files", "hold no rows")])
    return found


def _form_of(row: Any) -> RowForm:
    """Return the form of files with such a row."""
    if isinstance(row, dict) and SIDES[0] in row:
        return PAIRS
    return CONVERSATIONS


def _of_row(
    row: Any,
    where: str,
    form: RowForm,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    each: bool,
) -> Iterator[Example]:
    """Yield the conversations of a row."""
    try:
        conversations = form.read(row, template.knows)
        sides: tuple[str, ...] = SIDES
        if form is CONVERSATIONS:
            (conversation,) = conversations
            if each:
                conversations = tuple(each_turn(conversation))
            sides = ("",) * len(conversations)
        for side, conversation in zip(sides, conversations, strict=True):
            yield _example(conversation, where, side, tokenizer, template)
    except ValueError as error:  # a BadConversationError among others
        fix = getattr(error, "fix", "")
        problem = Problem(where, "cannot be used", str(error), fix)
        raise DataError(_TITLE, [problem]) from error


def _example(
    conversation: Conversation,
    where: str,
    side: str,
    tokenizer: Tokenizer,
    template: ChatTemplate,
) -> Example:
    """Return a conversation as text, in pieces of trained and other tokens."""
    written = template.write(conversation)
    ids, characters, mask = trained_tokens(tokenizer, written)
    weights = np.zeros(len(written.text))
    mask = np.array(mask, np.float64)
    mask[:1] = 0  # the first token is no target
    for (begin, end), weight in zip(characters.tolist(), mask.tolist(), strict=True):
        weights[begin:end] = np.maximum(weights[begin:end], weight)
    changes = np.flatnonzero(np.diff(weights)) + 1
    bounds = [0, *changes.tolist(), len(written.text)]
    pieces = []
    for begin, end in itertools.pairwise(bounds):
        if begin < end:
            pieces.append((written.text[begin:end], float(weights[begin])))
    return Example(where, side, tuple(pieces), len(ids), int(np.count_nonzero(mask)))
