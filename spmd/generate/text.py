"""Text from prompts, streamed or all at once."""

from collections.abc import Iterator, Sequence

from spmd.data.tokenizer import Tokenizer
from spmd.generate.detokenize import IncrementalDetokenizer
from spmd.generate.generator import Generator
from spmd.generate.sampling import Sampling
from spmd.plan.plan import ShardingPlan
from spmd.train.state import ModelState, TrainState

AnyState = TrainState | ModelState


def make_generator(plan: ShardingPlan, tokenizer: Tokenizer, window: int, sampling: Sampling) -> Generator:
    """Return a generator that stops at the tokenizer's end tokens."""
    return Generator(plan, window, sampling, tokenizer.ends)


def stream_text(
    generator: Generator, tokenizer: Tokenizer, state: AnyState, prompt: str, *, tokens: int, seed: int
) -> Iterator[str]:
    """Yield the continuation of a prompt piece by piece; `tokens` is the most tokens to add."""
    ids = tokenizer.encode_prompt(prompt)
    detokenizer = IncrementalDetokenizer(tokenizer, ids.tolist())
    for (token,) in generator.stream(state.params, state.variables, [ids], tokens=tokens, seed=seed):
        if token not in generator.ends:
            yield detokenizer.add(int(token))
    yield detokenizer.finish()


def generate_texts(
    generator: Generator, tokenizer: Tokenizer, state: AnyState, prompts: Sequence[str], *, tokens: int, seed: int
) -> list[str]:
    """Return each prompt with its continuation; the arguments are those of `stream_text`."""
    ids = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    rows = generator.write(state.params, state.variables, ids, tokens=tokens, seed=seed)
    texts = []
    for prompt, prompt_ids, row in zip(prompts, ids, rows, strict=True):
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids.tolist())
        added = [detokenizer.add(int(token)) for token in row if token not in generator.ends]
        texts.append("".join([prompt, *added, detokenizer.finish()]))
    return texts
