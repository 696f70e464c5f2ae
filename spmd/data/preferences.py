"""Read pairs of answers to one prompt: the preferred one, `chosen`, and the other, `rejected`.

| prompt | answers |
|---|---|
| a text under `prompt`, `question` or `instruction`, with `system` if there is one | texts |
| messages under `prompt`, `messages` or `conversations` | messages, one message, or a text |
| none, or a text | whole conversations, which begin alike |
| none | texts with turns after `Human:` and `Assistant:`, which begin alike |

Trained are the assistant's messages after those that both conversations have.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd.data.chat import ROLES, BadConversationError, Conversation, read_messages
from spmd.data.message_fields import FLAGS, is_turned_off

SIDES = ("chosen", "rejected")
"""Fields of the preferred and of the other answer."""
_PROMPT_TEXTS = ("prompt", "question", "instruction")
_PROMPT_MESSAGES = ("prompt", "messages", "conversations")
PAIR_FIELDS = (*_PROMPT_TEXTS, *_PROMPT_MESSAGES[1:], *SIDES, "system", "tools")
"""Fields of a line that are read."""

_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_UNTRAINED = FLAGS[1]


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
    missing = [f'no "{side}" answer' for side in SIDES if line.get(side) is None]
    if missing:
        raise BadConversationError(" and ".join(missing) + f"; it has {', '.join(line)}")
    problems: list[str] = []
    prompt = read_messages(_prompt_of(line), "prompt message", roles, problems)
    conversations = []
    for side in SIDES:
        answer = read_messages(_answer_of(line[side], side), f"{side} message", roles, problems)
        conversations.append(_joined(prompt, answer))
    if problems:
        raise BadConversationError("; ".join(problems))
    shared = _shared_messages(*conversations)
    tools = line.get("tools")
    pair = []
    for side, messages in zip(SIDES, conversations, strict=True):
        _check_answer(messages[shared:], side)
        pair.append(Conversation((*map(_untrained, messages[:shared]), *messages[shared:]), tools))
    return pair[0], pair[1]


def _prompt_of(line: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a line's prompt, not checked yet; none without a prompt."""
    for name in _PROMPT_MESSAGES:
        if isinstance(line.get(name), list):
            return list(line[name])
    messages = []
    if line.get("system"):
        messages.append({"role": "system", "content": line["system"]})
    for name in _PROMPT_TEXTS:
        if line.get(name) is not None:
            return [*messages, {"role": "user", "content": line[name]}]
    return messages


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
    if _TURN.match(answer):
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
    """Return a conversation; an answer may be a whole one, with the prompt in it."""
    begins_with_answer = bool(answer) and answer[0].get("role") == "assistant"
    if begins_with_answer or not prompt:
        return [*prompt, *answer]
    if list(answer[: len(prompt)]) == list(prompt) or _repeats(prompt, answer):
        return list(answer)
    return [*prompt, *answer]


def _repeats(prompt: Sequence[Any], answer: Sequence[Any]) -> bool:
    """Return whether a conversation has the last message of the prompt, the user's, as its own."""
    last = prompt[-1]
    return last.get("role") == "user" and last in answer


def _shared_messages(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of equal messages at the start of both conversations.

    The last message of either is none of them.
    """
    most = min(len(one), len(other)) - 1
    for number in range(most):
        if one[number] != other[number]:
            return number
    return most


def _check_answer(messages: Sequence[Mapping[str, Any]], side: str) -> None:
    """Raise if an answer has no message of the assistant to train."""
    said = [message for message in messages if message["role"] == "assistant"]
    if not said:
        raise BadConversationError(f'"{side}" has no message of the assistant')
    if all(map(is_turned_off, said)):
        raise BadConversationError(f'every message of "{side}" is marked not to be trained')


def _untrained(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of the prompt, marked not to be trained if it is the assistant's."""
    if message["role"] != "assistant":
        return dict(message)
    plain = {name: value for name, value in message.items() if name not in FLAGS}
    return {**plain, _UNTRAINED: False}
