"""Read pairs of answers to one prompt: the preferred one, `chosen`, and the other, `rejected`.

| prompt | answers |
|---|---|
| a text under `prompt`, `question` or `instruction`, with `input` behind it if there is one | texts |
| messages under `prompt`, `messages` or `conversations` | messages, one message, or a text |
| none, or the same again | whole conversations, which begin alike |
| none, or the same again | texts with turns after `Human:` and `Assistant:`, which begin alike |

A text under `system` comes before all. Trained are the assistant's messages after those that both
conversations have.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd.data.chat import ROLES, BadConversationError, Conversation, read_messages, untrained
from spmd.data.message_fields import is_turned_off, weight_of

SIDES = ("chosen", "rejected")
"""Fields of the preferred and of the other answer."""
_PROMPT_TEXTS = ("prompt", "question", "instruction", "input")
_PROMPT_MESSAGES = ("messages", "conversations")
PAIR_FIELDS = (*_PROMPT_TEXTS, *_PROMPT_MESSAGES, *SIDES, "system", "tools")
"""Fields of a line that are read."""

_HAS_TURNS = re.compile(r"\s*(Human|Assistant):")
_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant): ?")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_SYSTEM = ("system", "developer")


def read_pair(
    line: Any, roles: Callable[[str], bool] = ROLES.__contains__
) -> tuple[Conversation, Conversation]:
    """Return the preferred and the other conversation of a JSON value.

    `roles` tells which roles there are. Messages of the prompt are marked not to be trained.

    Raises:
        BadConversationError: All problems of the line.

    Example:
        >>> chosen, rejected = read_pair({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"})
        >>> [message["content"] for message in rejected.messages]
        ['2 + 2?', '5']
    """
    if not isinstance(line, dict):
        raise BadConversationError("the line is not an object")
    missing = []
    for side in SIDES:
        if line.get(side) is None:
            missing.append(f'no "{side}" answer')
    if missing:
        raise BadConversationError(" and ".join(missing) + f"; it has {', '.join(line)}")
    problems: list[str] = []
    prompt = read_messages(_prompt_of(line), "prompt message", roles, problems)
    answers = []
    for side in SIDES:
        listed = _answer_of(line[side], side)
        answers.append(read_messages(listed, f"{side} message", roles, problems))
    if problems:
        raise BadConversationError("; ".join(problems))
    conversations = []
    for answer in answers:
        conversations.append(_with_system(line, _joined(prompt, answer)))
    shared = _shared_messages(*conversations)
    _check_prompt(conversations[0][:shared])
    tools = line.get("tools")
    pair = []
    for side, messages in zip(SIDES, conversations, strict=True):
        _check_answer(messages[shared:], side)
        pair.append(Conversation((*map(untrained, messages[:shared]), *messages[shared:]), tools))
    return pair[0], pair[1]


def _prompt_of(line: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a line's prompt, not checked yet; none without a prompt.

    Messages under `messages` may be a whole conversation beside a prompt, so they come last.
    """
    if isinstance(line.get("prompt"), list) and line["prompt"]:
        return list(line["prompt"])
    texts = []
    for name in _PROMPT_TEXTS:
        if line.get(name) not in (None, [], ""):
            texts.append(line[name])
    if texts:
        return _messages_of_texts(texts)
    for name in _PROMPT_MESSAGES:
        if isinstance(line.get(name), list):
            return list(line[name])
    return []


def _messages_of_texts(texts: Sequence[Any]) -> list[Any]:
    """Return the messages of a prompt as a text, or as an instruction and its input."""
    if len(texts) == 1:
        (text,) = texts
    else:
        text = "\n".join(map(str, texts))
    if isinstance(text, str) and _HAS_TURNS.match(text):
        turns = _turns(text)
        if turns[-1] == {"role": "assistant", "content": ""}:
            turns.pop()  # where the answer begins
        return turns
    return [{"role": "user", "content": text}]


def _answer_of(answer: Any, side: str) -> list[Any]:
    """Return the messages of an answer, not checked yet."""
    if isinstance(answer, list):
        if not answer:
            raise BadConversationError(f'"{side}" has no message')
        return answer
    if isinstance(answer, dict):
        return [answer]
    if not isinstance(answer, str):
        raise BadConversationError(f'"{side}" is neither a text nor messages')
    if _HAS_TURNS.match(answer):
        return _turns(answer)
    return [{"role": "assistant", "content": answer}]


def _turns(text: str) -> list[dict[str, str]]:
    """Return the messages of a text with turns after `Human:` and `Assistant:`.

    Example:
        >>> [message["role"] for message in _turns("\\n\\nHuman: hi\\n\\nAssistant: ho")]
        ['user', 'assistant']
    """
    _, *parts = _TURN.split(text)
    messages = []
    for speaker, said in zip(parts[::2], parts[1::2], strict=True):
        messages.append({"role": _SPEAKERS[speaker], "content": said})
    return messages


def _joined(prompt: Sequence[Any], answer: Sequence[Any]) -> list[Any]:
    """Return a conversation from a prompt and an answer; the answer may repeat its end."""
    if list(answer[: len(prompt)]) == list(prompt):
        return list(answer)
    if answer[0]["role"] == "assistant":
        if prompt[-1]["role"] == "assistant":
            raise BadConversationError("the prompt ends with a message of the assistant")
        return [*prompt, *answer]
    for count in range(min(len(prompt), len(answer)), 0, -1):
        if list(prompt[-count:]) == list(answer[:count]):
            return [*prompt[:-count], *answer]
    if len(prompt) == 1:  # the answer is a whole conversation, with a prompt of its own
        return list(answer)
    return [*prompt, *answer]


def _with_system(line: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    """Return a conversation with the line's system message, unless it has one of its own."""
    text = line.get("system")
    if not text or any(message["role"] in _SYSTEM for message in messages):
        return messages
    return [{"role": "system", "content": text}, *messages]


def _shared_messages(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of equal messages at the start of both conversations.

    The last message of either is none of them.
    """
    most = min(len(one), len(other)) - 1
    for number in range(most):
        if one[number] != other[number]:
            return number
    return most


def _check_prompt(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise if both conversations have no message of the user at their beginning."""
    if any(message["role"] == "user" for message in messages):
        return
    fields = ", ".join(f'"{name}"' for name in (*_PROMPT_TEXTS, *_PROMPT_MESSAGES))
    what = "the answers have no prompt in common"
    raise BadConversationError(f"{what}: no {fields}, and they do not begin with the same question")


def _check_answer(messages: Sequence[Mapping[str, Any]], side: str) -> None:
    """Raise if an answer has no message of the assistant to train."""
    said = [message for message in messages if message["role"] == "assistant"]
    if not said:
        raise BadConversationError(f'"{side}" has no message of the assistant')
    if all(map(is_turned_off, said)):
        raise BadConversationError(f'every message of "{side}" is marked not to be trained')
    if not set(map(weight_of, said)) <= {0.0, 1.0}:
        raise BadConversationError(f'"{side}" has a weight other than 0 and 1, and pairs have none')
