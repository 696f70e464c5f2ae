"""Settings of low-rank adapters."""

import dataclasses
import math

from spmd.errors import ConfigError, Problem, check_fields
from spmd.lora.weight_formats import FORMATS
from spmd.settings.quantize import parse_table, table_problems
from spmd.sharding.patterns import PatternError, compile_pattern

TITLE = "Invalid adapters:"
"""Title of errors."""


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters of frozen parameters."""

    targets: tuple[str, ...] = ()
    """Parameters with an adapter: patterns as in a rule table. If empty, all are trained."""
    rank: int = 8
    """Columns of A and rows of B."""
    alpha: float = 16.0
    """The product of A and B is multiplied by alpha / rank."""
    save_base: bool = False
    """Checkpoints have the frozen parameters of init, too: the run no longer needs that folder."""
    quantize: str = ""
    """Store frozen kernels in fewer bits (QLoRA): nf4, mxfp4 or int8, or PATTERN=FORMAT,… with bf16
    for those left as they are. Embeddings, logits and norms are never quantized."""
    ranks: str = ""
    """Other ranks of some targets: PATTERN=RANK,…; the first match decides."""
    rank_stabilized: bool = False
    """Multiply by alpha / √rank instead (rsLoRA), so that higher ranks learn as fast."""
    dora: bool = False
    """Train the magnitude of each output beside the direction of its weights (DoRA)."""

    def __post_init__(self) -> None:
        problems = check_fields(self, {"rank": "at least 1", "alpha": "finite"}, "lora.")
        problems += table_problems(self.quantize, FORMATS, setting="lora.quantize", kind="format")
        problems += _rank_problems(self.ranks)
        if not self.targets and self._has_settings:
            what = "is empty, so no parameter has an adapter"
            fix = "patterns over parameter paths, such as 'attention/(q|v)_proj/kernel'"
            problems.append(Problem("lora.targets", what, fix=fix))
        if not self.alpha:
            problems.append(Problem("lora.alpha", "is 0", fix="another number, such as 16"))
        for index, pattern in enumerate(self.targets):
            problems += _pattern_problems(f"lora.targets[{index}]", pattern)
        if problems:
            raise ConfigError(TITLE, problems)

    @property
    def _has_settings(self) -> bool:
        """Whether a field is not its default."""
        fields = dataclasses.fields(self)
        return any(getattr(self, field.name) != field.default for field in fields)

    def scale_of(self, rank: int) -> float:
        """Return the factor of the product of A and B.

        That of stabilized ranks is of Kalajdzievski, arXiv:2312.03732.

        Example:
            >>> LoRAConfig(targets=("kernel",), alpha=16).scale_of(4)
            4.0
            >>> LoRAConfig(targets=("kernel",), alpha=16, rank_stabilized=True).scale_of(4)
            8.0
        """
        if self.rank_stabilized:
            return self.alpha / math.sqrt(rank)
        return self.alpha / rank


def rank_rows(ranks: str) -> list[tuple[str, int]]:
    """Return the rows of `LoRAConfig.ranks`: pattern and rank.

    Example:
        >>> rank_rows("attention/.*=4, mlp/.*=16")
        [('attention/.*', 4), ('mlp/.*', 16)]
    """
    return [(pattern, int(rank)) for pattern, rank in parse_table(ranks)]


def _rank_problems(ranks: str) -> list[Problem]:
    """Return a problem for each row without a pattern or a rank."""
    problems = list[Problem]()
    if ranks and "=" not in ranks:
        fix = "PATTERN=RANK, such as mlp/.*=16; lora.rank is for all targets"
        return [Problem("lora.ranks", f"is {ranks!r}", fix=fix)]
    for pattern, rank in parse_table(ranks):
        where = f"lora.ranks, row {pattern + '=' + rank!r}"
        if not pattern or not rank.isdecimal() or int(rank) < 1:
            fix = "PATTERN=RANK, such as mlp/.*=16"
            problems.append(Problem(where, "has no pattern or no rank", fix=fix))
        problems += _pattern_problems(where, pattern)
    return problems


def _pattern_problems(where: str, pattern: str) -> list[Problem]:
    """Return a problem if a pattern is no regular expression."""
    try:
        compile_pattern(pattern)
    except PatternError as error:
        what = f"{pattern!r} is not a regular expression: {error}"
        return [Problem(where, what)]
    return []
