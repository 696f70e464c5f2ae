"""Conversations as text, by the chat template of a tokenizer, with the assistant's parts marked.

A template is rendered as `transformers` does, in jinja2's sandbox. Where it marks the assistant's
text, by `{% generation %}` blocks, the mark is used. Otherwise the text before a turn of the
assistant, with the prompt for it, must begin the text with that turn, and the rest of this text is
the turn.
"""

import dataclasses
import datetime
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from spmd.checkpoint.manifest import read_bounded, read_object
from spmd.data.message_fields import FLAGS, flag_problems, is_turned_off, map_texts, weight_of
from spmd.data.template_worker import BEGIN, END, MAX_SOURCE, WORKER, Part, RejectedTemplateError
from spmd.data.tokenizer import SETTINGS, ByteTokenizer, Tokenizer
from spmd.errors import ConfigError, DataError, Problem, check_fields, did_you_mean
from spmd.storage.address import location_problems
from spmd.storage.download import is_side_file, local_path

TEMPLATE = "chat_template.jinja"
"""File with the template beside a tokenizer; otherwise it is the field `chat_template` of
`SETTINGS`."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of messages; a template may name others."""

LINE_FIELDS = ("messages", "conversations", "prompt", "completion", "tools")
"""Fields of a line that are read."""

_SHARE_GPT = {
    "human": "user",
    "gpt": "assistant",
    "function_response": "tool",
    "observation": "tool",
}
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_MAX_BYTES = 2**24
_SHOWN = 24
_OWNER = "\ufdd2"  # has no meaning in any text, as the marks of generation blocks
_UNTRAINED = FLAGS[1]
_MARKS = (BEGIN, END, _OWNER)
_TITLE = "Invalid chat template:"

Longer = Literal["refuse", "drop", "truncate"]
Turns = Literal["together", "each"]


@dataclasses.dataclass(frozen=True)
class ChatConfig:
    """Conversations, with `--task sft` or `--task dpo`."""

    template: str = ""
    """Jinja file of the chat template, or its address; empty: that of the tokenizer's folder, or
    else of init."""
    longer: Longer = "refuse"
    """Conversations that are longer than a sequence: refuse the data, drop them, or truncate
    them."""
    date: str = ""
    """Date for templates that write today's, such as 2025-01-31: a resumed run must have the
    same text."""
    turns: Turns = "together"
    """Conversations with several turns of the assistant: together, in one text; or each turn by
    itself, after what precedes it: for templates that leave out the reasoning of earlier turns."""

    def __post_init__(self) -> None:
        rules = {"longer": get_args(Longer), "turns": get_args(Turns)}
        problems = check_fields(self, rules, "chat.")
        problems += location_problems("chat.template", self.template)
        try:
            _ = self.now
        except ValueError as error:
            what = f"is {self.date!r}: {error}"
            problems.append(Problem("chat.date", what, fix="year-month-day"))
        if problems:
            raise ConfigError("invalid chat config:", problems)

    @property
    def now(self) -> datetime.datetime | None:
        """The date, if there is one."""
        if not self.date:
            return None
        return datetime.datetime.fromisoformat(self.date)


class BadConversationError(ValueError):
    """A conversation cannot be used, or a template does not accept it; `fix` is the remedy."""

    def __init__(self, text: str, fix: str = "") -> None:
        super().__init__(text)
        self.fix = fix


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages with the fields `role` and `content`, and those of the template's own.

    And tools, if any.
    """

    messages: tuple[dict[str, Any], ...]
    tools: Any = None


class TrainedPart(NamedTuple):
    """Trained part of a text.

    Attributes:
        begin: Its first character.
        end: The character after it.
        weight: Weight in the loss of each of its tokens.
    """

    begin: int
    end: int
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class ChatText:
    """Text of a conversation.

    Attributes:
        parts: The parts that are trained.
        read: Names of the fields of messages that the template read.
    """

    text: str
    parts: tuple[TrainedPart, ...]
    read: frozenset[str] = dataclasses.field(default=frozenset(), compare=False, repr=False)


def read_conversation(line: Any, roles: Callable[[str], bool] = ROLES.__contains__) -> Conversation:
    """Return the conversation of a JSON value.

    It has `messages` (with `role` and `content`), `conversations` (with `from` and `value`), or the
    texts `prompt` and `completion`, and may have `tools`. `roles` tells which roles there are.

    Raises:
        BadConversationError: All problems of the line.
    """
    if not isinstance(line, dict):
        raise BadConversationError("the line is not an object")
    problems: list[str] = []
    messages = read_messages(_listed_messages(line), "message", roles, problems)
    said = [message for message in messages if message.get("role") == "assistant"]
    if not problems and not said:
        problems.append("no message is the assistant's, so that nothing is trained")
    elif not problems and all(map(is_turned_off, said)):
        what = "every message of the assistant is marked not to be trained, so that nothing is"
        problems.append(what)
    if problems:
        raise BadConversationError("; ".join(problems))
    return Conversation(tuple(messages), line.get("tools"))


def read_messages(
    listed: Sequence[Any], name: str, roles: Callable[[str], bool], problems: list[str]
) -> list[dict[str, Any]]:
    """Return messages with their role and content under these names.

    Add what is wrong to `problems`, in which they are `name` with a number from 1.
    """
    messages = []
    for number, each in enumerate(listed, 1):
        messages.append(_message(each, f"{name} {number}", roles, problems))
    return messages


def _listed_messages(line: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a line, not checked yet; prompt and completion are two."""
    for name in ("messages", "conversations"):
        if name not in line:
            continue
        listed = line[name]
        if not isinstance(listed, list):
            raise BadConversationError(f'"{name}" is not a list of messages')
        if not listed:
            raise BadConversationError(f'"{name}" has no message')
        return listed
    if "prompt" in line and "completion" in line:
        return [
            {"role": "user", "content": line["prompt"]},
            {"role": "assistant", "content": line["completion"]},
        ]
    has = ", ".join(list(line)[:_SHOWN]) or "nothing"
    needed = '"messages", "conversations", or "prompt" and "completion"'
    raise BadConversationError(f"no {needed}; it has {has}")


def _message(
    given: Any, where: str, roles: Callable[[str], bool], problems: list[str]
) -> dict[str, Any]:
    """Return a message with its role and content under these names.

    Add what is wrong to `problems`.
    """
    message = {}
    if isinstance(given, dict):
        # `transformers` drops null fields as well: templates ask whether a field is there.
        message = {name: value for name, value in given.items() if value is not None}
    if "role" not in message and "from" in message:
        sender = message.pop("from")
        if isinstance(sender, str):
            sender = _SHARE_GPT.get(sender, sender)
        message["role"] = sender
        if "value" in message:
            message["content"] = message.pop("value")
    role = message.get("role")
    content = message.get("content")
    calls = message.get("tool_calls")
    if not isinstance(role, str):
        problems.append(f"{where} has no role")
    elif not roles(role):
        problems.append(f"{where} has the unknown role {role!r} ({did_you_mean(role, ROLES)})")
    if not isinstance(content, str) and not (content is None and calls):
        problems.append(f'{where} has no text under "content"')
    elif role == "assistant" and not (content or "").strip() and not calls:
        problems.append(f"{where}, the assistant's, is empty")
    elif any(mark in (content or "") for mark in _MARKS):
        marks = "U+FDD0, U+FDD1 or U+FDD2, which are used as marks"
        problems.append(f"{where} has a character {marks}")
    problems += flag_problems(message, where)
    return message


@dataclasses.dataclass(frozen=True, eq=False)
class ChatTemplate:
    """Chat template with the special tokens of a tokenizer; see `find_template`.

    Example:
        >>> source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        >>> template = ChatTemplate(source, "an example")
        >>> messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"})
        >>> template.write(Conversation(messages))
        ChatText(text='<user>hi<assistant>ho', parts=(TrainedPart(begin=8, end=21, weight=1.0),))

    Raises:
        DataError: The template is not Jinja, or writes the date and has none.
    """

    source: str
    where: str
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    now: datetime.datetime | None = None

    def __post_init__(self) -> None:
        if len(self.source) > MAX_SOURCE:
            what = f"has {len(self.source):,} characters, above the limit of {MAX_SOURCE:,}"
            raise DataError(_TITLE, [Problem(self.where, what)])
        if self._facts["writes_date"] and self.now is None:
            problem = Problem(
                self.where,
                "may write today's date",
                "a resumed run would have other text",
                "--chat.date YEAR-MONTH-DAY, such as 2025-01-31",
            )
            raise DataError(_TITLE, [problem])

    @functools.cached_property
    def _facts(self) -> Mapping[str, bool]:
        try:
            return WORKER.check(self.source)
        except RejectedTemplateError as error:
            problem = Problem(self.where, "is not a Jinja template", f"it {error}")
            raise DataError(_TITLE, [problem]) from error

    @property
    def marks_turns(self) -> bool:
        """Whether the template has `{% generation %}` blocks."""
        return self._facts["marks_turns"]

    def knows(self, role: str) -> bool:
        """Return whether messages may have this role."""
        return role in ROLES or f"'{role}'" in self.source or f'"{role}"' in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        prompt: bool = False,
        read: set[str] | None = None,
    ) -> str:
        """Return the text of messages, with the marks of generation blocks.

        Args:
            messages: As of a `Conversation`.
            tools: Passed to the template.
            prompt: End with what precedes the assistant's answer.
            read: Gets the names of the fields of messages that the template reads.

        Raises:
            BadConversationError: The template refuses, fails, or asks for too much.
        """
        (text,), names = self._render(messages, tools, [Part(prompt=prompt)])
        if read is not None:
            read |= names
        return text

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return messages as text with the beginning of an answer, for generation.

        Raises:
            BadConversationError: As of `render`.
        """
        return _without_marks(self.render(messages, prompt=True))[0]

    def unfinished(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return messages as text up to the end of the last one's, for generation to go on there.

        Raises:
            BadConversationError: As of `render`, or the last message's text is not in it.
        """
        text = _without_marks(self.render(messages))[0]
        last = str(messages[-1]["content"]).lstrip()
        at = text.rfind(last.strip())
        if at < 0:
            raise BadConversationError("the template changes the last message, which is to go on")
        if text.startswith(last, at):
            return text[: at + len(last)]
        return text[: at + len(last.rstrip())]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, parts: Sequence[Part]
    ) -> tuple[list[str], set[str]]:
        """Return the text of each part of the messages, and the fields read for the first one."""
        values: dict[str, Any] = {"tools": tools, "documents": None, **self.tokens}
        try:
            return WORKER.render(self.source, list(messages), values, self.now, parts)
        except RejectedTemplateError as error:
            raise BadConversationError(f"the template {error}") from error

    def write(self, conversation: Conversation) -> ChatText:
        """Return a conversation's text, and the parts of the assistant's turns not turned off.

        Raises:
            BadConversationError: The template refuses it, or its turns cannot be told apart.
        """
        messages = conversation.messages
        said = []
        for number, message in enumerate(messages, 1):
            if message["role"] == "assistant" and not is_turned_off(message):
                said.append(number)
        parts = [Part()]
        if not self.marks_turns:
            for number in said:
                parts += [Part(number - 1, prompt=True), Part(number)]
        (text, *others), read = self._render(messages, conversation.tools, parts)
        if self.marks_turns:
            return self._write_marked(conversation, text, frozenset(read))
        trained = []
        for number, before, through in zip(said, others[::2], others[1::2], strict=True):
            _check_prefix(before, through, f"the prompt for message {number} and the text with it")
            _check_prefix(through, text, f"the text with message {number} and the whole text")
            weight = weight_of(messages[number - 1])
            trained.append(TrainedPart(len(before), len(through), weight))
        return ChatText(text, tuple(trained), frozenset(read))

    def _write_marked(
        self, conversation: Conversation, marked: str, read: frozenset[str]
    ) -> ChatText:
        """Return the text without marks, and the generation blocks of trained messages.

        Which message a block is of is read from another text, in which each message's own texts
        have its number.
        """
        text, spans = _without_marks(marked)
        weights = {}
        numbered = []
        for number, message in enumerate(conversation.messages):
            weights[str(number)] = weight_of(message)
            numbered.append(_with_owner(number, message))
        if set(weights.values()) == {1.0}:
            return ChatText(text, tuple(TrainedPart(*span) for span in spans), read)
        tagged, blocks = _without_marks(self.render(numbered, conversation.tools))
        owners = [set(tagged[begin:end].split(_OWNER)[1::2]) for begin, end in blocks]
        _check_owners(owners, weights, len(spans))
        trained = []
        for span, block in zip(spans, owners, strict=True):
            weight = weights[min(block)]
            if weight:
                trained.append(TrainedPart(*span, weight))
        return ChatText(text, tuple(trained), read)


def each_turn(conversation: Conversation) -> Iterator[Conversation]:
    """Yield each trained turn of the assistant by itself, after the messages before it, untrained.

    Example:
        >>> roles = ("user", "assistant", "user", "assistant")
        >>> messages = tuple({"role": role, "content": "hi"} for role in roles)
        >>> [len(turn.messages) for turn in each_turn(Conversation(messages))]
        [2, 4]
    """
    before = list[dict[str, Any]]()
    for message in conversation.messages:
        if message["role"] == "assistant" and not is_turned_off(message):
            yield Conversation((*before, message), conversation.tools)
        before.append(untrained(message))


def untrained(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message, marked not to be trained if it is the assistant's."""
    if message["role"] != "assistant":
        return dict(message)
    plain = {name: value for name, value in message.items() if name not in FLAGS}
    return {**plain, _UNTRAINED: False}


def _with_owner(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its number after each of its own texts, between marks."""
    return map_texts(lambda own: f"{own}{_OWNER}{number}{_OWNER}", message)


def _check_owners(owners: list[set[str]], weights: Mapping[str, float], count: int) -> None:
    """Raise unless each of `count` generation blocks is of messages with one weight."""
    detail = ""
    if len(owners) != count:
        detail = "its generation blocks vary"
    for number, block in enumerate(owners, 1):
        of_block = {weights[number_of_message] for number_of_message in block}
        if len(of_block) != 1:
            detail = f"generation block {number} is not of one message"
            break
    if detail:
        what = "some turns have weights or are not trained, and they cannot be told apart"
        fix = "--chat.template FILE with a generation block for each turn"
        raise BadConversationError(f"{what}: {detail}", fix)


def _check_prefix(start: str, text: str, what: str) -> None:
    """Raise if a text does not begin with another one."""
    if text.startswith(start):
        return
    at = 0
    for expected, found in zip(start, text, strict=False):
        if expected != found:
            break
        at += 1
    detail = f"{what} differ at character {at}: {_piece(start, at)} and {_piece(text, at)}"
    fix = (
        "--chat.turns each, for a template that changes earlier turns; or --chat.template FILE with "
        "the assistant's text in {% generation %} … {% endgeneration %}"
    )
    raise BadConversationError(f"its turns cannot be told apart: {detail}", fix)


def _piece(text: str, at: int) -> str:
    """Return the next characters of a text, in quotes."""
    if not text[at:]:
        return "the end"
    return repr(text[at : at + _SHOWN])


def _without_marks(text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the text without marks, and the spans between them."""
    first, *others = text.split(BEGIN)
    pieces = [first]
    spans = []
    at = len(first)
    for other in others:
        inside, _, after = other.partition(END)
        spans.append((at, at + len(inside)))
        pieces += [inside, after]
        at += len(inside) + len(after)
    return "".join(pieces), tuple(spans)


def find_template(
    config: ChatConfig, folders: Sequence[Path], tokens: Mapping[str, str]
) -> ChatTemplate:
    """Return the template of a config, or of the first folder with one.

    Args:
        config: Its `template` is a file.
        folders: Of a tokenizer, and of a model; the first one's special tokens are known to the
            template.
        tokens: Special tokens of a tokenizer without a folder.

    Raises:
        DataError: There is none, or a file cannot be read.
    """
    problems: list[Problem] = []
    tokens = dict(tokens)
    if folders:
        tokens |= _special_tokens(folders[0], problems)
    found: str | None = None
    where = config.template
    if config.template:
        found = _read_text(local_path(config.template), problems)
        folders = ()
    for folder in folders:
        if (folder / TEMPLATE).exists():
            where = str(folder / TEMPLATE)
            found = _read_text(folder / TEMPLATE, problems)
        else:
            where = f"{folder / SETTINGS}: chat_template"
            found = _template_in_settings(folder, problems)
        if found is not None:
            break
    if found is None and not problems:
        looked = "it is bytes"
        if folders:
            searched = " and ".join(map(str, folders))
            looked = f"looked for {TEMPLATE} and {SETTINGS} in {searched}"
        fix = "--chat.template FILE, or --data.tokenizer DIR/tokenizer.json of a chat model"
        problems.append(Problem("data.tokenizer", "has no chat template", looked, fix))
    if problems or found is None:
        raise DataError(_TITLE, problems)
    return ChatTemplate(found, where, tokens, config.now)


def find_tokenizer_template(
    config: ChatConfig, tokenizer: Tokenizer, path: str, more: Sequence[Path] = ()
) -> ChatTemplate:
    """Return the template of a config, beside a tokenizer at `path`, or in one of more folders.

    Raises:
        DataError: There is none, or a file cannot be read.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return find_template(config, [], {"eos_token": tokenizer.decode([tokenizer.eos])})
    folder = local_path(path, is_side_file).parent
    return find_template(config, [folder, *more], {})


def _read_text(path: Path, problems: list[Problem]) -> str | None:
    try:
        return read_bounded(path.resolve(), _MAX_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        problems.append(Problem(str(path), "is a chat template that cannot be read", str(error)))
        return None


def _settings(path: Path, problems: list[Problem]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return read_object(path.resolve(), _MAX_BYTES)
    except (OSError, ValueError) as error:
        problems.append(Problem(str(path), "cannot be read", str(error)))
        return {}


def _template_in_settings(folder: Path, problems: list[Problem]) -> str | None:
    """Return `chat_template` of a tokenizer's settings: a text, or the "default" of a list."""
    found = _settings(folder / SETTINGS, problems).get("chat_template")
    if isinstance(found, list):
        named = {}
        for each in found:
            if isinstance(each, dict):
                named[each.get("name")] = each.get("template")
        found = named.get("default")
    if not isinstance(found, str):
        return None
    return found


def _special_tokens(folder: Path, problems: list[Problem]) -> dict[str, str]:
    values = {
        **_settings(folder / _SPECIAL_TOKENS_FILE, problems),
        **_settings(folder / SETTINGS, problems),
    }
    return dict(_texts_of(values))


def _texts_of(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _SPECIAL_TOKENS:
        token = values.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            yield name, token
