"""Parser of config.json with a problem for every unknown field."""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from flax.core import FrozenDict

from spmd.errors import ConfigError, Problem, SpmdError, shorten

T = TypeVar("T")

_MAX_INTEGER = 2**31 - 1
_SAME_NAMES: Mapping[str, str] = FrozenDict()

HARMLESS = frozenset(
    {
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "_name_or_path",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "pretraining_tp",
        "max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "task_specific_params",
        "_attn_implementation",
        "output_router_logits",
        "is_encoder_decoder",
        "id2label",
        "label2id",
        "auto_map",
        "max_length",
        "_num_labels",
        "transformers.js_config",
        "is_llama_config",
        "unsloth_fixed",
        "unsloth_version",
    }
)
"""Fields without effect on a trained model; export copies them from the original config.json."""

_HARMLESS_IF_OFF = frozenset(
    {
        "use_mrope",
        "use_sliding_window",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "add_cross_attention",
        "is_decoder",
        "tie_encoder_decoder",
        "chunk_size_feed_forward",
        "torchscript",
        "use_bfloat16",
        "tf_legacy_loss",
        "remove_invalid_values",
        "return_dict_in_generate",
        "do_sample",
        "early_stopping",
        "output_scores",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "num_beam_groups",
        "diversity_penalty",
        "rope_interleaved",
    }
)
"""Fields that are ignored if false or 0."""


class Fields:
    """Fields of one config.json; problems are collected, and all of them are raised at the end.

    Args:
        values: The file.
        names: Common name of a field → its name in files of this family, such as `n_embd`; problems
            have the latter.

    Example:
        >>> fields = Fields({"hidden_size": 64, "hidden_act": "gelu", "use_cache": True})
        >>> width = fields.integer("hidden_size")
        >>> fields.only("hidden_act", "silu")
        >>> print(*(problem for problem in fields.problems()))
        hidden_act: is 'gelu', and this model supports only silu
    """

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str] = _SAME_NAMES) -> None:
        self._values = dict(values)
        self._names = names
        self._known: set[str] = set()
        self._problems: list[Problem] = []

    def value(self, name: str, default: Any = None) -> Any:
        """Return a field unchecked; `default` if it is absent or null."""
        theirs = self._names.get(name, name)
        self._known.add(theirs)
        found = self._values.get(theirs)
        if found is None:
            return default
        return found

    def is_null(self, name: str) -> bool:
        """Return whether a field is present and null.

        For some fields this differs from an absent one.
        """
        theirs = self._names.get(name, name)
        return theirs in self._values and self._values[theirs] is None

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer of at least 1; required if it has no default."""
        found = self.value(name, default)
        if isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= _MAX_INTEGER:
            return found
        self.refuse(name, _wrong(found, f"not an integer from 1 to {_MAX_INTEGER}"))
        return 1

    def number(self, name: str, default: float | None = None, least: float = -math.inf) -> float:
        """Return a finite number of at least `least`; required if it has no default."""
        found = self.value(name, default)
        if not self.is_number(name, found, least):
            return 1.0
        return float(found)

    def is_number(self, where: str, found: Any, least: float = -math.inf) -> bool:
        """Return whether a value is a finite number of at least `least`.

        Report a problem at `where` otherwise.
        """
        highest = sys.float_info.max
        lowest = max(least, -highest)
        is_real = isinstance(found, int | float) and not isinstance(found, bool)
        if is_real and lowest <= found <= highest:
            return True
        bound = ""
        if least > -math.inf:
            bound = f" of at least {least:g}"
        self.refuse(where, _wrong(found, f"not a finite number{bound}"))
        return False

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean field; null means false, and is refused where the default is true."""
        if default and self.is_null(name):
            self.refuse(name, "is null, and the model's default is true", "true or false")
        found = self.value(name, default)
        if not isinstance(found, bool):
            self.refuse(name, _wrong(found, "neither true nor false"))
        return found is True

    def only(self, name: str, *allowed: Any) -> None:
        """Require one of the values supported by the model; an absent field means the first."""
        found = self.value(name, allowed[0])
        if found not in allowed:
            supported = " or ".join(map(str, allowed))
            self.refuse(name, f"is {shorten(found)}, and this model supports only {supported}")

    def refuse(self, name: str, what: str, fix: str = "") -> None:
        """Report a problem with a field."""
        self._problems.append(Problem(self._names.get(name, name), what, fix=fix))

    def nested(self, make: Callable[..., T], **values: Any) -> T | None:
        """Construct a nested config; return None and report its problems if it is invalid."""
        with collect_errors(self._problems):
            return make(**values)
        return None

    def rename(self, names: Mapping[str, str]) -> None:
        """Name fields of the file, in place of those of a nested config, in the problems so far.

        Example:
            >>> fields = Fields({})
            >>> fields.refuse("router.top_k", "is more than router.experts")
            >>> fields.rename({"router.top_k": "moe_k", "router.experts": "num_experts"})
            >>> print(*fields.problems())
            moe_k: is more than num_experts
        """
        problems = []
        for problem in self._problems:
            where, what = problem.where, problem.what
            for ours, theirs in names.items():
                where = where.replace(ours, theirs)
                what = what.replace(ours, theirs)
            problems.append(dataclasses.replace(problem, where=where, what=what))
        self._problems = problems

    def problems(self) -> list[Problem]:
        """Return all problems, with one for each unknown field."""
        fix = "if it does not change what the model computes, remove it from config.json"
        problems = list(self._problems)
        for name, value in self._values.items():
            if not self._is_understood(name, value):
                problems.append(Problem(name, f"is {shorten(value)}, and is unknown", fix=fix))
        return problems

    def _is_understood(self, name: str, value: Any) -> bool:
        """Return whether a field was read or is harmless."""
        return name in self._known or is_harmless(name, value)

    def build(self, make: Callable[..., T], **values: Any) -> T:
        """Construct the model config.

        Raises:
            ConfigError: All problems of the file and of the config class.
        """
        made = self.nested(make, **values)
        problems = self.problems()
        if problems or made is None:
            title = "Unsupported features in config.json:"
            raise ConfigError(title, problems)
        return made


def is_harmless(name: str, value: Any) -> bool:
    """Return whether a field with this value has no effect on the trained models of any family.

    Example:
        >>> is_harmless("torchscript", False), is_harmless("torchscript", True)
        (True, False)
    """
    if value is None or name in HARMLESS:
        return True
    return name in _HARMLESS_IF_OFF and value in (False, 0)


def renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return fields under the names of a family, as in `Fields`.

    Example:
        >>> renamed({"hidden_size": 8, "vocab_size": 9}, {"hidden_size": "n_embd"})
        {'n_embd': 8, 'vocab_size': 9}
    """
    return {names.get(name, name): value for name, value in values.items()}


def _wrong(found: Any, why: str) -> str:
    if found is None:
        return "is missing"
    return f"is {shorten(found)}, {why}"


@contextlib.contextmanager
def collect_errors(problems: list[Problem]) -> Iterator[None]:
    """Append the problems of an SpmdError raised inside to a list."""
    try:
        yield
    except SpmdError as error:
        problems += error.problems
