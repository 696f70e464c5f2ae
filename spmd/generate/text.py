"""Text from prompts, streamed or all at once, and from token ids one by one."""

from collections.abc import Container, Iterator, Sequence
from typing import Any

from spmd.data.tokenizer import Tokenizer
from spmd.errors import ConfigError, Problem
from spmd.generate.generator import ENDED, Generator, LoadedModel, Tokens
from spmd.generate.sampling import Sampling
from spmd.plan.plan import ShardingPlan
from spmd.training.evaluated_params import evaluated_params
from spmd.training.state import ModelState, TrainState

AnyState = TrainState | ModelState

_INCOMPLETE = "\ufffd"
"""Stands for an incomplete character in decoded text."""
_MAX_INCOMPLETE = 3
"""Most bytes of an incomplete UTF-8 character."""


class IncrementalDetokenizer:
    """Decoder of one token after another, behind `ids`; an incomplete character is held back.

    Example:
        >>> from spmd.data.tokenizer import ByteTokenizer
        >>> detokenizer = IncrementalDetokenizer(ByteTokenizer(), [104])
        >>> [detokenizer.add(token) for token in "é!".encode()]
        ['', 'é', '!']
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(ids)
        self._start = 0
        self._complete = len(self._ids)
        self._returned = tokenizer.decode(self._ids)

    def add(self, token: int) -> str:
        """Add a token, and return the newly complete text."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._start :])
        incomplete = min(len(text) - len(text.rstrip(_INCOMPLETE)), _MAX_INCOMPLETE)
        # Some tokenizers decode a run of bytes all or none: an incomplete character undoes the
        # complete one before it.
        is_undone = not text.startswith(self._returned)
        if is_undone and len(self._ids) - self._complete <= _MAX_INCOMPLETE:
            return ""
        start = len(self._returned)
        end = max(start, len(text) - incomplete)
        self._returned = text[:end]
        if not incomplete:
            # Decode only from the last complete piece: a tokenizer may need one piece of context.
            self._start = self._complete
            self._complete = len(self._ids)
            self._returned = self._tokenizer.decode(self._ids[self._start :])
        return text[start:end]

    def finish(self) -> str:
        """Return the text held back."""
        text = self._tokenizer.decode(self._ids[self._start :])
        return text[len(self._returned) :]


class TextUpToStop:
    """Text of one row of tokens, up to an end token or a stop string, neither of them included.

    Text is held back while it may be the beginning of a stop string.

    Example:
        >>> from spmd.data.tokenizer import ByteTokenizer
        >>> text = TextUpToStop(ByteTokenizer(), [], stops=["--"])
        >>> [text.add(token) for token in b"a-b--c"], text.has_ended
        (['a', '', '-b', '', '', ''], True)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ids: Sequence[int],
        *,
        ends: Container[int] = (),
        stops: Sequence[str] = (),
        skipped: Container[int] = (),
    ) -> None:
        """Begin behind `ids`.

        Args:
            ends: Tokens that end the row.
            stops: Strings that end the text.
            skipped: Tokens without a text.

        Raises:
            ConfigError: A stop string is empty, or there is one string in place of a sequence.
        """
        problems = stop_problems(stops)
        if problems:
            raise ConfigError("No text can be generated:", problems)
        self._detokenizer = IncrementalDetokenizer(tokenizer, ids)
        self._ends = ends
        self._stops = stops
        self._skipped = skipped
        self._held = ""
        self.has_ended = False

    def add(self, token: int) -> str:
        """Add a token, and return the new text; no more after the end."""
        if self.has_ended:
            return ""
        if token == ENDED or token in self._ends:
            return self.finish()
        if token in self._skipped:
            return ""
        return self._release(self._detokenizer.add(token), is_last=False)

    def finish(self) -> str:
        """End the text, and return the part held back; none after the end."""
        if self.has_ended:
            return ""
        text = self._release(self._detokenizer.finish(), is_last=True)
        self.has_ended = True
        return text

    def _release(self, text: str, *, is_last: bool) -> str:
        """Return the certain part of the text at hand, and hold the rest back."""
        text = self._held + text
        places = [text.find(stop) for stop in self._stops if stop in text]
        if places:
            self.has_ended = True
            return text[: min(places)]
        held = 0
        if not is_last:
            held = max((_overlap(text, stop) for stop in self._stops), default=0)
        released = len(text) - held
        self._held = text[released:]
        return text[:released]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest beginning of a stop string at the end of a text."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def stop_problems(stops: Any) -> list[Problem]:
    """Return the problem of stop strings, if they have one."""
    if isinstance(stops, str):
        what = f"is one string, {stops!r}, and would be read as its letters"
        return [Problem("stop", what, fix=f"a sequence of strings: [{stops!r}]")]
    if "" not in stops:
        return []
    fix = "name the text to stop at, such as $'\\n\\n' in bash"
    return [Problem("stop", "is empty: every text would stop at once", fix=fix)]


def make_generator(
    plan: ShardingPlan, tokenizer: Tokenizer, window: int, sampling: Sampling
) -> Generator:
    """Return a generator with the tokenizer's end tokens."""
    return Generator(plan, window, sampling, tokenizer.ends)


def load_state(generator: Generator, state: AnyState, plan: ShardingPlan) -> LoadedModel:
    """Load a model's state, or the parameters to evaluate of a training run.

    Args:
        plan: Of the training; that of the generator may be another one.
    """
    if not isinstance(state, ModelState):
        state = ModelState(evaluated_params(plan, state), state.variables)
    return generator.load(state.params, state.variables)


def stream_text(
    model: LoadedModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    seed: int,
    stops: Sequence[str] = (),
) -> Iterator[str]:
    """Yield the continuation of a prompt piece by piece.

    Args:
        tokens: Most tokens to add.
        stops: The text ends before any of these.
    """
    ids = tokenizer.encode_prompt(prompt)
    ends = model.generator.ends
    text = TextUpToStop(tokenizer, ids.tolist(), ends=ends, stops=stops)
    for (token,) in model.stream([ids], tokens=tokens, seed=seed):
        yield text.add(int(token))
        if text.has_ended:
            return
    yield text.finish()


def generate_texts(
    model: LoadedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int,
    seed: int,
    stops: Sequence[str] = (),
) -> list[str]:
    """Return each prompt with its continuation; the arguments are those of `stream_text`."""
    ids = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    added = continue_rows(model, tokenizer, ids, tokens=tokens, seed=seed, stops=stops)
    return [prompt + text for prompt, text in zip(prompts, added, strict=True)]


def continue_rows(
    model: LoadedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Tokens],
    *,
    tokens: int,
    seed: int,
    stops: Sequence[str] = (),
    skipped: Container[int] = (),
) -> list[str]:
    """Return the continuation of each row of ids; the batch ends as soon as all rows have.

    The arguments are those of `stream_text` and `TextUpToStop`.
    """
    ends = model.generator.ends
    rows = []
    for ids in prompts:
        rows.append(TextUpToStop(tokenizer, list(ids), ends=ends, stops=stops, skipped=skipped))
    texts = [""] * len(rows)
    for drawn in model.stream(prompts, tokens=tokens, seed=seed):
        for number, token in enumerate(drawn.tolist()):
            texts[number] += rows[number].add(token)
        if all(row.has_ended for row in rows):
            break
    for number, row in enumerate(rows):
        texts[number] += row.finish()
    return texts
