"""Text from a run's state, as it is drawn or when it is done."""

from collections.abc import Iterator, Sequence

import numpy as np

from spmd.data.tokenizer import Tokenizer
from spmd.generate.generator import Generator
from spmd.generate.sampling import Sampling
from spmd.run.build import TrainSetup
from spmd.train.state import ModelState, TrainState

_CUT = "\ufffd"
"""What a tokenizer decodes a part of a character to."""
_LONGEST_CUT = 3
"""Bytes of UTF-8 that a character may still be without."""


class IncrementalDetokenizer:
    """The text of tokens that come one by one. A character that is not there as a whole is held back.

    Args:
        tokenizer: Of the tokens.
        ids: Those that come before; they are not part of the text.

    Example:
        >>> from spmd.data.tokenizer import ByteTokenizer
        >>> pieces = Pieces(ByteTokenizer(), [104])
        >>> [pieces.add(token) for token in "é!".encode()]
        ['', 'é', '!']
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(ids)
        self._first, self._whole, self._given = 0, len(self._ids), tokenizer.decode(self._ids)

    def add(self, token: int) -> str:
        """What is known of the text with one more token, and was not before."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._first :])
        cut = min(len(text) - len(text.rstrip(_CUT)), _LONGEST_CUT)
        # Some tokenizers decode bytes in a row all or none: what was a character is none while the next one is cut.
        if not text.startswith(self._given) and len(self._ids) - self._whole <= _LONGEST_CUT:
            return ""
        piece = text[len(self._given) : len(text) - cut]
        self._given = text[: max(len(self._given), len(text) - cut)]
        if not cut:  # what stands before is not decoded again; a tokenizer may need to see the last piece
            self._first, self._whole = self._whole, len(self._ids)
            self._given = self._tokenizer.decode(self._ids[self._first :])
        return piece

    def finish(self) -> str:
        """What is still held back."""
        return self._tokenizer.decode(self._ids[self._first :])[len(self._given) :]


def make_generator(setup: TrainSetup, sampling: Sampling) -> Generator:
    """What writes on the setup's mesh, up to a token that ends a text."""
    return Generator(setup.plan, setup.config.data.sequence, sampling, setup.tokenizer.ends)


def encode(setup: TrainSetup, prompts: Sequence[str]) -> list[np.ndarray]:
    """The token ids of each prompt, with what the tokenizer begins a text with."""
    return [setup.tokenizer.encode_prompt(prompt) for prompt in prompts]


def stream_text(
    setup: TrainSetup, generator: Generator, state: TrainState | ModelState, prompt: str, *, tokens: int, seed: int
) -> Iterator[str]:
    """What follows a prompt, piece by piece.

    Args:
        setup: The run.
        generator: From `make_generator`.
        state: The training state, or the model's part of it.
        prompt: What to go on from.
        tokens: How many tokens to add.
        seed: Of the draws.
    """
    (ids,) = encode(setup, [prompt])
    pieces = IncrementalDetokenizer(setup.tokenizer, ids.tolist())
    for (token,) in generator.stream(state.params, state.variables, [ids], tokens=tokens, seed=seed):
        if token not in generator.ends:
            yield pieces.add(int(token))
    yield pieces.finish()


def write_texts(
    setup: TrainSetup,
    generator: Generator,
    state: TrainState | ModelState,
    prompts: Sequence[str],
    *,
    tokens: int,
    seed: int,
) -> list[str]:
    """Each prompt and what follows it; the arguments are those of `stream_text`."""
    ids = encode(setup, prompts)
    rows = generator.write(state.params, state.variables, ids, tokens=tokens, seed=seed)
    texts = []
    for prompt, start, row in zip(prompts, ids, rows, strict=True):
        pieces = IncrementalDetokenizer(setup.tokenizer, start.tolist())
        added = [pieces.add(int(token)) for token in row if token not in generator.ends]
        texts.append("".join([prompt, *added, pieces.finish()]))
    return texts
