"""Text from prompts, streamed or all at once, and from token ids one by one."""

from collections.abc import Iterator, Sequence

from spmd.data.tokenizer import Tokenizer
from spmd.generate.generator import Generator
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


def make_generator(
    plan: ShardingPlan, tokenizer: Tokenizer, window: int, sampling: Sampling
) -> Generator:
    """Return a generator with the tokenizer's end tokens."""
    return Generator(plan, window, sampling, tokenizer.ends)


def stream_text(
    generator: Generator,
    tokenizer: Tokenizer,
    state: AnyState,
    prompt: str,
    *,
    tokens: int,
    seed: int,
) -> Iterator[str]:
    """Yield the continuation of a prompt piece by piece; `tokens` is the most tokens to add."""
    ids = tokenizer.encode_prompt(prompt)
    detokenizer = IncrementalDetokenizer(tokenizer, ids.tolist())
    model = _evaluated(generator, state)
    rows = generator.stream(model.params, model.variables, [ids], tokens=tokens, seed=seed)
    for (token,) in rows:
        if token not in generator.ends:
            yield detokenizer.add(int(token))
    yield detokenizer.finish()


def generate_texts(
    generator: Generator,
    tokenizer: Tokenizer,
    state: AnyState,
    prompts: Sequence[str],
    *,
    tokens: int,
    seed: int,
) -> list[str]:
    """Return each prompt with its continuation; the arguments are those of `stream_text`."""
    ids = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    model = _evaluated(generator, state)
    rows = generator.write(model.params, model.variables, ids, tokens=tokens, seed=seed)
    texts = []
    for prompt, prompt_ids, row in zip(prompts, ids, rows, strict=True):
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids.tolist())
        pieces = [prompt]
        for token in row:
            if token not in generator.ends:
                pieces.append(detokenizer.add(int(token)))
        pieces.append(detokenizer.finish())
        texts.append("".join(pieces))
    return texts


def _evaluated(generator: Generator, state: AnyState) -> ModelState:
    """Return the parameters to evaluate of a training run, and its variables.

    A model's state is unchanged.
    """
    if isinstance(state, ModelState):
        return state
    params = evaluated_params(generator.plan, state)
    return ModelState(params, state.variables)
