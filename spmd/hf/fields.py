"""A config.json read field by field, so that whatever is not understood is named and nothing is guessed."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from spmd.errors import ConfigError, Problem, SpmdError

T = TypeVar("T")

MOST = 2**31 - 1
"""The largest whole number that a field may be: no model's is near it."""

HARMLESS = frozenset(
    {
        *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("use_cache", "initializer_range", "attention_dropout", "pretraining_tp", "max_position_embeddings"),
        *("output_attentions", "output_hidden_states", "return_dict", "task_specific_params", "_attn_implementation"),
        *("output_router_logits", "is_encoder_decoder", "id2label", "label2id", "auto_map", "max_length"),
        *("_num_labels", "transformers.js_config", "is_llama_config", "unsloth_fixed", "unsloth_version"),
    }
)
"""Fields that do not change what a trained model computes; export writes them back as they were."""

_OFF = frozenset(
    {
        *("use_mrope", "use_sliding_window", "attention_bias", "mlp_bias", "tie_word_embeddings"),
        *("add_cross_attention", "is_decoder", "tie_encoder_decoder", "chunk_size_feed_forward"),
        *("torchscript", "use_bfloat16", "tf_legacy_loss", "remove_invalid_values", "return_dict_in_generate"),
        *("do_sample", "early_stopping", "output_scores", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        *("num_beam_groups", "diversity_penalty", "rope_interleaved"),
    }
)
"""Fields that say what a model does not have, or does not do, where they are false or 0."""


class Fields:
    """The fields of one config.json; every complaint is kept, and all are raised at the end.

    Example:
        >>> fields = Fields({"hidden_size": 64, "hidden_act": "gelu", "use_cache": True})
        >>> width = fields.integer("hidden_size")
        >>> fields.only("hidden_act", "silu")
        >>> print(*(problem for problem in fields.problems()))
        hidden_act: is 'gelu', and this model has silu alone
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._known: set[str] = set()
        self._problems: list[Problem] = []

    def value(self, name: str, default: Any = None) -> Any:
        """A field as it is; `default` where it is absent or null."""
        self._known.add(name)
        found = self._values.get(name)
        return default if found is None else found

    def is_null(self, name: str) -> bool:
        """Whether the file says null, which for some fields means none, where saying nothing means a default."""
        return name in self._values and self._values[name] is None

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1, which must be there if it has no default."""
        found = self.value(name, default)
        if isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= MOST:
            return found
        what = "is missing" if found is None else f"is {found!r:.80}, and no whole number from 1 to {MOST}"
        self._problems.append(Problem(name, what))
        return 1

    def number(self, name: str, default: float | None = None, least: float = -math.inf) -> float:
        """A finite number of at least `least`, which must be there if it has no default."""
        found = self.value(name, default)
        return float(found) if self.is_number(name, found, least) else 1.0

    def is_number(self, where: str, found: Any, least: float = -math.inf) -> bool:
        """Whether a value is a finite number, with a complaint where it is none.

        Args:
            where: The field, or the part of one.
            found: The value.
            least: The least that it may be.
        """
        lowest, highest = max(least, -sys.float_info.max), sys.float_info.max
        if isinstance(found, int | float) and not isinstance(found, bool) and lowest <= found <= highest:
            return True
        wanted = f"no finite number of {least:g} or more" if least > -math.inf else "no finite number"
        self._problems.append(Problem(where, "is missing" if found is None else f"is {found!r:.80}, and {wanted}"))
        return False

    def flag(self, name: str, default: bool) -> bool:
        """A field that is true or false."""
        found = self.value(name, default)
        if not isinstance(found, bool):
            self._problems.append(Problem(name, f"is {found!r:.80}, and neither true nor false"))
        return found is True

    def only(self, name: str, *allowed: Any) -> None:
        """Says that the model has a feature in one form only; the first of `allowed` is what an absent field means.

        Args:
            name: The field.
            *allowed: The values that the model has.
        """
        found = self.value(name, allowed[0])
        if found not in allowed:
            can = " or ".join(str(value) for value in allowed)
            self._problems.append(Problem(name, f"is {found!r:.80}, and this model has {can} alone"))

    def refuse(self, name: str, what: str, arithmetic: str = "") -> None:
        """A complaint of the family's own.

        Args:
            name: The field.
            what: One clause that says what is wrong.
            arithmetic: The numbers that show it.
        """
        self._problems.append(Problem(name, what, arithmetic))

    def nested(self, make: Callable[..., T], **values: Any) -> T | None:
        """A part of the shape that is a class of its own; None, and its complaints kept, where it cannot be made."""
        with collect_errors(self._problems):
            return make(**values)
        return None

    def rope(self, default: float, *kinds: str) -> tuple[float, dict[str, Any]]:
        """The base of rotary positions, and how they are scaled, in each of the forms that these are written in.

        Args:
            default: The base where the file says nothing.
            *kinds: The types of scaling that the model has.

        Returns:
            The base, and the table of the scaling, without its type; empty for none.
        """
        theta, scaling = self.value("rope_theta", default), dict[str, Any]()
        tables = {name: table for name in ("rope_parameters", "rope_scaling") if (table := self.value(name, {})) != {}}
        said = []
        for name, table in tables.items():
            if not isinstance(table, Mapping):
                self._problems.append(Problem(name, f"is {table!r:.80}, and no table"))
                continue
            kind = table.get("rope_type", table.get("type", "default"))
            rest = {key: value for key, value in table.items() if key not in ("rope_theta", "rope_type", "type")}
            said.append((table.get("rope_theta", theta), kind, rest))
            if said[0] != said[-1]:
                fix = "keep the one that the model was trained with"
                self._problems.append(Problem(name, "differs from rope_parameters, and the file has both", fix=fix))
            elif kind in kinds:
                scaling |= rest
            elif kind != "default":
                can = f"{' or '.join(kinds)} alone" if kinds else "no scaling of positions"
                self._problems.append(Problem(name, f"is of type {kind!r:.80}, and this model has {can}"))
            else:
                self._problems += [
                    Problem(f"{name}.{key}", f"is {rest[key]!r:.80}, and is not known") for key in sorted(rest)
                ]
        theta = said[0][0] if said else theta
        return float(theta) if self.is_number("rope_theta", theta, least=1.0) else default, scaling

    def problems(self) -> list[Problem]:
        """All complaints, with one for every field that nothing was asked of and that could mean something."""
        fix = "if it changes nothing that the model computes, take it out of config.json"
        unknown = {n: v for n, v in self._values.items() if n not in self._known | HARMLESS and v is not None}
        rest = {n: v for n, v in unknown.items() if not (n in _OFF and v in (False, 0))}
        return [*self._problems, *(Problem(n, f"is {v!r:.80}, and is not known", fix=fix) for n, v in rest.items())]

    def build(self, make: Callable[..., T], **shape: Any) -> T:
        """The model's shape.

        Args:
            make: Its class.
            **shape: Its fields.

        Raises:
            ConfigError: Every complaint of this file and of the class, at once.
        """
        made = self.nested(make, **shape)
        if (problems := self.problems()) or made is None:
            raise ConfigError("This config.json asks for what the model does not have:", problems)
        return made


@contextlib.contextmanager
def collect_errors(problems: list[Problem]) -> Iterator[None]:
    """Puts the problems of an error that is raised inside into a list."""
    try:
        yield
    except SpmdError as error:
        problems += error.problems
