"""Tasks of EleutherAI's lm-eval (`lm_eval`) for a trained model, on the mesh of its setup.

`lm_eval` makes the requests and computes the metrics; log-likelihoods and generated texts are ours.
Tokens are as `lm_eval` makes them for models of `transformers`: with the tokenizer's start tokens,
and the beginning of what is longer than the model's context cut off.
"""

import contextlib
import dataclasses
import functools
import io
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd.data.chat import BadConversationError, ChatTemplate
from spmd.data.packing import PackedDocuments
from spmd.data.tokenizer import Tokenizer
from spmd.errors import ConfigError, DataError, Problem, did_you_mean
from spmd.generate.generator import Generator, LoadedModel
from spmd.generate.model_arrays import ModelArrays
from spmd.generate.sampling import Sampling
from spmd.generate.text import continue_rows
from spmd.model_interface.model_config import context_of
from spmd.run.build import TrainSetup
from spmd.run.token_scores import TokenScorer
from spmd.training.state import ModelState

_TITLE = "No tasks to evaluate:"
_SHORTEST = 32
"""Fewest tokens of a row; others have the next power of two."""
_FEWSHOT_SEED = 1234
"""Seed of the choice of examples, that of `lm_eval`."""
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the number of new tokens of a request."""
_MOST_NEW_TOKENS = 256
"""New tokens of a request without a number, as in `lm_eval`."""

_LOADING_ERRORS = (OSError, ValueError, RuntimeError, LookupError, ImportError)
"""Errors of data sets: no network, no such set, an unreadable file."""

Scored = tuple[list[int], list[int]]
"""Tokens of a context, and of its continuation."""


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Tasks of `lm_eval`, and how they are evaluated."""

    names: tuple[str, ...]
    folders: tuple[str, ...] = ()
    """Folders with task files of one's own."""
    fewshot: int | None = None
    """Examples in a prompt; None: as the task says."""
    limit: int | None = None
    """Documents of each task; None: all."""
    chat: bool = False
    """Write prompts by the chat template."""


@dataclasses.dataclass(frozen=True)
class TaskModel:
    """A trained model as tasks see it: scores of continuations, and texts.

    Attributes:
        template: Chat template, for tasks as conversations.
    """

    setup: TrainSetup
    model: ModelState
    tokenizer: Tokenizer
    template: ChatTemplate | None = None

    @functools.cached_property
    def longest(self) -> int:
        """Most tokens of a request: the model's context, or the sequence of its training."""
        config: Any = self.setup.config.model
        return context_of(config) or self.setup.config.data.sequence

    @functools.cached_property
    def _scorer(self) -> TokenScorer:
        return TokenScorer(self.setup)

    @property
    def prefix(self) -> int:
        """Token before a text without a context: the one for a beginning, or else the end token."""
        tokenizer = self.tokenizer
        if tokenizer.bos is not None:
            return tokenizer.bos
        return (*tokenizer.starts, tokenizer.eos)[0]

    def encode(self, text: str, *, with_starts: bool) -> list[int]:
        """Return the tokens of a text, with the tokenizer's start tokens unless it has them."""
        if with_starts:
            return list(map(int, self.tokenizer.encode_prompt(text)))
        return list(map(int, self.tokenizer.encode_chat(text)[0]))

    def log_likelihoods(self, requests: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation in nats, and whether it is the greedy one."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for length, numbers in self._by_length(requests):
            documents = [_document(requests[number], self.longest) for number in numbers]
            scores = self._score(documents, length)
            for number, each in zip(numbers, scores, strict=True):
                found[number] = each
        return found

    def _by_length(self, requests: Sequence[Scored]) -> Iterator[tuple[int, list[int]]]:
        """Yield the length of rows, and the numbers of the requests in rows of this length."""
        groups = dict[int, list[int]]()
        for number, request in enumerate(requests):
            if request[1]:
                targets = len(_document(request, self.longest)[0]) - 1
                groups.setdefault(self._row_length(targets), []).append(number)
        yield from sorted(groups.items(), reverse=True)

    def _row_length(self, tokens: int) -> int:
        """Return the next power of two, at most the longest, and a multiple over `sequence`."""
        shards = self.setup.plan.mesh.shape["sequence"]
        unit = 1 if shards == 1 else 2 * shards  # blocks of zigzag order
        length = min(max(_SHORTEST, 1 << (tokens - 1).bit_length()), max(self.longest, tokens))
        return -(-length // unit) * unit

    def _score(
        self, documents: Sequence[tuple[list[int], int]], length: int
    ) -> Iterator[tuple[float, bool]]:
        """Yield the sum of the last tokens' log-probabilities of each document.

        And whether all of them are the most likely ones.
        """
        lengths = [len(ids) for ids, _ in documents]
        ends = np.cumsum(lengths)
        mask = np.zeros(int(ends[-1]), bool)
        for end, (_, scored) in zip(ends.tolist(), documents, strict=True):
            mask[end - scored : end] = True
        tokens = np.concatenate([np.asarray(ids, np.uint32) for ids, _ in documents])
        rows = PackedDocuments(tokens, ends, length, mask, alone=True)
        log_probs = np.zeros(len(tokens), np.float64)
        correct = np.zeros(len(tokens), bool)
        for scores in self._scorer.score(self.model.params, self.model.variables, rows):
            log_probs[scores.places] = scores.log_probs
            correct[scores.places] = scores.correct
        for end, (_, scored) in zip(ends.tolist(), documents, strict=True):
            own = slice(end - scored, end)
            yield float(log_probs[own].sum()), bool(correct[own].all())

    def write(self, prompts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        """Return the continuation of each prompt, up to a stop string.

        `options` are those of a request of `lm_eval`: `until`, `max_gen_toks`, `do_sample`,
        `temperature`, `top_k` and `top_p`.
        """
        most = _new_tokens(options)
        room = self.longest - most
        if room < 1:
            what = f"generates {most} tokens"
            detail = f"the model reads {self.longest} tokens at once"
            raise ConfigError(_TITLE, [Problem("a task", what, detail, "fewer: max_gen_toks")])
        model = self._loaded(_sampling(options))
        stops = _stops(options)
        texts = list[str]()
        size = self.setup.config.data.batch
        for first in range(0, len(prompts), size):
            some = prompts[first : first + size]
            ids = [self.encode(prompt, with_starts=True)[-room:] for prompt in some]
            texts += continue_rows(
                model,
                self.tokenizer,
                ids,
                tokens=most,
                seed=first,
                stops=stops,
                skipped=self.tokenizer.specials,
            )
        return texts

    def _loaded(self, sampling: Sampling) -> LoadedModel:
        """Return the model for a sampling, which has programs of its own; all share the arrays."""
        if sampling not in self._generators:
            ends = self.tokenizer.ends
            generator = Generator(self.setup.plan, self.longest, sampling, ends)
            self._generators[sampling] = generator
        return LoadedModel(self._generators[sampling], self._arrays)

    @functools.cached_property
    def _generators(self) -> dict[Sampling, Generator]:
        """Generators by their sampling."""
        return {}

    @functools.cached_property
    def _arrays(self) -> ModelArrays:
        """The model in the form of generation."""
        generator = Generator(self.setup.plan, self.longest)
        return generator.load(self.model.params, self.model.variables).arrays


def _document(request: Scored, longest: int) -> tuple[list[int], int]:
    """Return the tokens of a request, cut at their beginning, and how many of them are scored."""
    context, continuation = request
    ids = [*context, *continuation][-(longest + 1) :]
    return ids, min(len(continuation), len(ids) - 1)


def _new_tokens(options: Mapping[str, Any]) -> int:
    """Return the largest number of new tokens of a request."""
    for name in _NEW_TOKENS:
        if options.get(name) is not None:
            return int(options[name])
    return _MOST_NEW_TOKENS


def _stops(options: Mapping[str, Any]) -> list[str]:
    """Return the stop strings of a request."""
    until = options.get("until") or []
    if isinstance(until, str):
        until = [until]
    return [stop for stop in until if stop]


def _sampling(options: Mapping[str, Any]) -> Sampling:
    """Return the sampling of a request: greedy, unless it asks for another one."""
    temperature = float(options.get("temperature") or 0.0)
    if options.get("do_sample") is False:
        temperature = 0.0
    elif options.get("do_sample") and not temperature:
        temperature = 1.0
    if not temperature:
        return Sampling(0.0, 0, 1.0)
    return Sampling(temperature, int(options.get("top_k") or 0), float(options.get("top_p") or 1.0))


class _Requests:
    """Methods of a language model of `lm_eval`, by a `TaskModel`."""

    own: TaskModel

    @property
    def eot_token_id(self) -> int:
        """The token at the end of a document."""
        return self.own.tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return self.own.prefix

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer."""
        return self.own.tokenizer.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        """Return the tokens of a text."""
        del options
        return self.own.encode(string, with_starts=add_special_tokens is not False)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        del options
        return self.own.log_likelihoods([(context, ids) for _, context, ids in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], **options: Any) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the longest sequence."""
        del options
        windows = list[Scored]()
        owners = list[int]()
        for owner, request in enumerate(requests):
            (text,) = request.args
            ids = self.own.encode(text, with_starts=True)
            for window in _rolling_windows(ids, self.own.prefix, self.own.longest):
                windows.append(window)
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self.own.log_likelihoods(windows), strict=True):
            totals[owner] += nats
        return totals

    def generate_until(self, requests: Sequence[Any], **options: Any) -> list[str]:
        """Return the generated text of each request; equal options are generated together."""
        del options
        groups = dict[str, list[int]]()
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            prompts = [requests[number].args[0] for number in numbers]
            found = self.own.write(prompts, requests[numbers[0]].args[1])
            for number, text in zip(numbers, found, strict=True):
                texts[number] = text
        return texts

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return messages as text; without a generation prompt, the last message is to go on."""
        write = self._template.prompt if add_generation_prompt else self._template.unfinished
        try:
            return write(chat_history)
        except BadConversationError:  # some templates have no system message
            others = [message for message in chat_history if message["role"] != "system"]
            try:
                return write(others)
            except BadConversationError as error:
                problem = Problem(self._template.where, "refuses a task", str(error), error.fix)
                raise DataError(_TITLE, [problem]) from error

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source of the chat template; there is one at most."""
        del chat_template
        return self._template.source

    @property
    def _template(self) -> ChatTemplate:
        assert self.own.template is not None, "checked before tasks are made"
        return self.own.template


def _rolling_windows(ids: Sequence[int], prefix: int, longest: int) -> Iterator[Scored]:
    """Yield windows of a text; each token is scored once.

    All but the first begin with the token before their own.

    Example:
        >>> list(_rolling_windows([1, 2, 3, 4, 5], prefix=0, longest=2))
        [([0], [1, 2]), ([2], [3, 4]), ([3, 4], [5])]
    """
    for first in range(0, len(ids), longest):
        scored = list(ids[first : first + longest])
        context = [prefix]
        if first:
            context = list(ids[first - 1 - (longest - len(scored)) : first])
        yield context, scored


def as_lm(own: TaskModel) -> Any:
    """Return the model as an `lm_eval.api.model.LM`, such as for `lm_eval.simple_evaluate`.

    Raises:
        ConfigError: `lm_eval` is not installed.
    """
    try:
        import lm_eval.api.model
    except ImportError as error:
        raise _not_installed(error) from error

    class Model(_Requests, lm_eval.api.model.TemplateLM):
        """The model as `lm_eval` calls it."""

    model = Model()
    model.own = own
    return model


def open_tasks(options: TaskOptions) -> Any:
    """Return the tasks of `lm_eval` with their documents.

    Raises:
        ConfigError: `lm_eval` is not installed, or has no such task, or one that is not for texts.
        DataError: The documents of a task cannot be loaded.
    """
    try:
        import lm_eval.tasks
    except ImportError as error:
        raise _not_installed(error) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
        manager = lm_eval.tasks.TaskManager(include_path=list(options.folders) or None)
        names = _matched_names(options, manager)
        try:
            loaded = manager.load(names)
        except _LOADING_ERRORS as error:
            raise _not_loaded(options, error) from error
    problems = list[Problem]()
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            what = "runs generated code on this machine, which spmd does not"
            problems.append(Problem(f"--tasks {name}", what, fix="lm_eval's own command"))
        if getattr(task, "MULTIMODAL", False):
            problems.append(Problem(f"--tasks {name}", "has images, and the model reads text"))
        _set_fewshot(task, options.fewshot)
    if problems:
        raise ConfigError(_TITLE, problems)
    return loaded


def evaluate_tasks(own: TaskModel, options: TaskOptions, loaded: Any) -> dict[str, dict[str, Any]]:
    """Return task → its figures, by the names of `lm_eval`, such as `acc,none`.

    Args:
        loaded: The result of `open_tasks`.
    """
    model = as_lm(own)
    import lm_eval

    with contextlib.redirect_stderr(io.StringIO()):
        found = lm_eval.evaluate(
            model,
            loaded,
            limit=options.limit,
            apply_chat_template=options.chat,
            fewshot_as_multiturn=options.chat,
            bootstrap_iters=0,  # which would fork this process
        )
    results = dict[str, dict[str, Any]]()
    for name, figures in found["results"].items():
        samples = found["samples"].get(name, [])
        results[name] = {**figures, **_standard_errors(figures, samples)}
    return results


def _not_installed(error: ImportError) -> ConfigError:
    fix = "pip install 'spmd[lm-eval]'"
    problem = Problem("lm-eval", "is not installed", str(error), fix)
    return ConfigError(_TITLE, [problem])


def _not_loaded(options: TaskOptions, error: Exception) -> DataError:
    """Return the error of tasks without documents."""
    detail = str(error).strip().partition("\n")[0] or type(error).__name__
    fix = "a network to the data sets, or a task file with data on this machine (--task-folder)"
    problem = Problem(", ".join(options.names), "cannot be loaded", detail, fix)
    return DataError(_TITLE, [problem])


def _set_fewshot(task: Any, fewshot: int | None) -> None:
    """Set the number of examples before a question, as `lm_eval` does on its command line.

    A task that has none by its own file keeps none.
    """
    default = task.get_config("num_fewshot")
    if fewshot is not None and default != 0:
        task.set_config(key="num_fewshot", value=fewshot)
    elif default is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=_FEWSHOT_SEED)


def _standard_errors(
    figures: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return the standard errors of means over documents, by the names of the figures."""
    errors = dict[str, float]()
    for key, value in figures.items():
        metric, _, filtered = key.partition(",")
        own = [each for each in samples if each.get("filter", filtered) == filtered]
        values = [each[metric] for each in own if isinstance(each.get(metric), int | float)]
        if len(values) < 2 or len(values) != len(own) or not isinstance(value, float):
            continue
        if math.isclose(sum(values) / len(values), value, abs_tol=1e-9):
            error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
            errors[f"{metric}_stderr,{filtered}"] = error
    return errors


def _matched_names(options: TaskOptions, manager: Any) -> list[str]:
    """Return the names of matching tasks; `*` matches anything.

    Raises:
        ConfigError: A folder is missing, or a name matches no task.
    """
    problems = list[Problem]()
    for folder in options.folders:
        if not Path(folder).is_dir():
            problems.append(Problem("--task-folder", f"{folder} is no folder"))
    names = list[str]()
    for name in options.names:
        matched = manager.match_tasks([name])
        names += matched
        if not matched:
            fix = did_you_mean(name, manager.all_tasks)
            problems.append(Problem("--tasks", f"{name!r} is no task", fix=fix))
    if problems:
        raise ConfigError(_TITLE, problems)
    return list(dict.fromkeys(names))
