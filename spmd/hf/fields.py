"""Parser of config.json that reports every field it does not understand."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from spmd.errors import ConfigError, Problem, SpmdError

T = TypeVar("T")

_MAX_INTEGER = 2**31 - 1

HARMLESS = frozenset(
    {
        *(
            "architectures",
            "model_type",
            "transformers_version",
            "torch_dtype",
            "dtype",
            "_name_or_path",
        ),
        *(
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "unk_token_id",
            "sep_token_id",
            "decoder_start_token_id",
        ),
        *(
            "use_cache",
            "initializer_range",
            "attention_dropout",
            "pretraining_tp",
            "max_position_embeddings",
        ),
        *(
            "output_attentions",
            "output_hidden_states",
            "return_dict",
            "task_specific_params",
            "_attn_implementation",
        ),
        *(
            "output_router_logits",
            "is_encoder_decoder",
            "id2label",
            "label2id",
            "auto_map",
            "max_length",
        ),
        *(
            "_num_labels",
            "transformers.js_config",
            "is_llama_config",
            "unsloth_fixed",
            "unsloth_version",
        ),
    }
)
"""Fields that do not change what a trained model computes; export copies them from the original
config.json."""

_HARMLESS_IF_OFF = frozenset(
    {
        *("use_mrope", "use_sliding_window", "attention_bias", "mlp_bias", "tie_word_embeddings"),
        *("add_cross_attention", "is_decoder", "tie_encoder_decoder", "chunk_size_feed_forward"),
        *(
            "torchscript",
            "use_bfloat16",
            "tf_legacy_loss",
            "remove_invalid_values",
            "return_dict_in_generate",
        ),
        *(
            "do_sample",
            "early_stopping",
            "output_scores",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
        ),
        *("num_beam_groups", "diversity_penalty", "rope_interleaved"),
    }
)
"""Fields that are ignored if false or 0."""


class Fields:
    """Fields of one config.json; problems are collected, and all of them are raised at the end.

    Example:
        >>> fields = Fields({"hidden_size": 64, "hidden_act": "gelu", "use_cache": True})
        >>> width = fields.integer("hidden_size")
        >>> fields.only("hidden_act", "silu")
        >>> print(*(problem for problem in fields.problems()))
        hidden_act: is 'gelu', and this model supports only silu
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._known: set[str] = set()
        self._problems: list[Problem] = []

    def value(self, name: str, default: Any = None) -> Any:
        """Return a field unchecked; `default` if it is absent or null."""
        self._known.add(name)
        found = self._values.get(name)
        return default if found is None else found

    def is_null(self, name: str) -> bool:
        """Return whether a field is present and null.

        For some fields this differs from an absent one.
        """
        return name in self._values and self._values[name] is None

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
        return float(found) if self.is_number(name, found, least) else 1.0

    def is_number(self, where: str, found: Any, least: float = -math.inf) -> bool:
        """Return whether a value is a finite number of at least `least`.

        Report a problem at `where` otherwise.
        """
        lowest, highest = max(least, -sys.float_info.max), sys.float_info.max
        if (
            isinstance(found, int | float)
            and not isinstance(found, bool)
            and lowest <= found <= highest
        ):
            return True
        bound = f" of at least {least:g}" if least > -math.inf else ""
        self.refuse(where, _wrong(found, f"not a finite number{bound}"))
        return False

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean field."""
        found = self.value(name, default)
        if not isinstance(found, bool):
            self.refuse(name, _wrong(found, "neither true nor false"))
        return found is True

    def only(self, name: str, *allowed: Any) -> None:
        """Require one of the values that the model supports; an absent field means the first."""
        found = self.value(name, allowed[0])
        if found not in allowed:
            self.refuse(
                name,
                f"is {found!r:.80}, and this model supports only {' or '.join(map(str, allowed))}",
            )

    def refuse(self, name: str, what: str, fix: str = "") -> None:
        """Report a problem with a field."""
        self._problems.append(Problem(name, what, fix=fix))

    def nested(self, make: Callable[..., T], **values: Any) -> T | None:
        """Construct a nested config; return None and report its problems if it is invalid."""
        with collect_errors(self._problems):
            return make(**values)
        return None

    def rope(self, default: float, *kinds: str) -> tuple[float, dict[str, Any]]:
        """Return the base of rotary position embeddings, and the fields of a scaling of one of `kinds` but its type."""
        theta, scaling = self.value("rope_theta", default), dict[str, Any]()
        tables = {
            name: table
            for name in ("rope_parameters", "rope_scaling")
            if (table := self.value(name, {})) != {}
        }
        parsed = []
        for name, table in tables.items():
            if not isinstance(table, Mapping):
                self.refuse(name, f"is {table!r:.80}, not an object")
                continue
            kind = table.get("rope_type", table.get("type", "default"))
            rest = {
                key: value
                for key, value in table.items()
                if key not in ("rope_theta", "rope_type", "type")
            }
            parsed.append((table.get("rope_theta", theta), kind, rest))
            if parsed[0] != parsed[-1]:
                fix = "keep the one that the model was trained with"
                self.refuse(name, "differs from rope_parameters, and the file has both", fix)
            elif kind in kinds:
                scaling |= rest
            elif kind != "default":
                can = f"only {' or '.join(kinds)}" if kinds else "no scaling of positions"
                self.refuse(name, f"is of type {kind!r:.80}, and this model supports {can}")
            else:
                for key in sorted(rest):
                    self.refuse(f"{name}.{key}", f"is {rest[key]!r:.80}, and is unknown")
        theta = parsed[0][0] if parsed else theta
        return float(theta) if self.is_number("rope_theta", theta, least=1.0) else default, scaling

    def problems(self) -> list[Problem]:
        """Return all problems, including one for each field that was not read and is not harmless."""
        fix = "if it does not change what the model computes, remove it from config.json"
        unknown = {
            n: v
            for n, v in self._values.items()
            if n not in self._known | HARMLESS and v is not None
        }
        rest = {n: v for n, v in unknown.items() if not (n in _HARMLESS_IF_OFF and v in (False, 0))}
        return [
            *self._problems,
            *(Problem(n, f"is {v!r:.80}, and is unknown", fix=fix) for n, v in rest.items()),
        ]

    def build(self, make: Callable[..., T], **values: Any) -> T:
        """Construct the model config, or raise a ConfigError with all problems of the file and of the config class."""
        made = self.nested(make, **values)
        if (problems := self.problems()) or made is None:
            raise ConfigError("Unsupported features in config.json:", problems)
        return made


def _wrong(found: Any, why: str) -> str:
    return "is missing" if found is None else f"is {found!r:.80}, {why}"


@contextlib.contextmanager
def collect_errors(problems: list[Problem]) -> Iterator[None]:
    """Append the problems of an SpmdError raised inside to a list."""
    try:
        yield
    except SpmdError as error:
        problems += error.problems
