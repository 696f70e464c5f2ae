"""Settings of preference training: the loss of pairs of a preferred and another answer.

| loss | of a pair, from log-probabilities of the preferred answer *w* and the other one *l* |
|---|---|
| `dpo` | −log σ(β (r_w − r_l)) |
| `ipo` | (r_w / n_w − r_l / n_l − 1 / 2β)² |
| `simpo` | −log σ(β (p_w / n_w − p_l / n_l) − γ) |

p is the log-probability of an answer, r its difference from that of the reference model, and n the
number of its tokens. `dpo` is from Rafailov et al. (arXiv:2305.18290, equation 7), `ipo` from Azar
et al. (arXiv:2310.12036, equation 17; means over tokens as in TRL), and `simpo`, without a reference
model, from Meng et al. (arXiv:2405.14734, equation 6).
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal, get_args

from spmd.errors import ConfigError, Problem, check_fields

PreferenceLoss = Literal["dpo", "ipo", "simpo"]

_BETA = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0}
"""Default β of each loss."""
_MARGIN = 1.0
"""Default margin γ of SimPO."""
_TOKENS_OF_PAIR = 32


def most_pairs(sequence: int) -> int:
    """Return the largest number of pairs in a row: one for each 32 of its tokens."""
    return -(-sequence // _TOKENS_OF_PAIR)


@dataclasses.dataclass(frozen=True)
class DPOConfig:
    """Loss of pairs of answers, with `--task dpo`."""

    loss: PreferenceLoss = "dpo"
    """dpo, ipo, or simpo (without a reference model)."""
    beta: float = 0.0
    """How strongly the model is held to the reference; with simpo, the scale of the difference. 0:
    0.1, and 2 for simpo."""
    margin: float = -1.0
    """Target margin of simpo; -1: 1."""
    label_smoothing: float = 0.0
    """Assumed share of pairs with exchanged answers, below 0.5; not for ipo."""
    nll: float = 0.0
    """Weight of a second loss: the mean negative log-likelihood of a preferred answer's tokens."""

    def __post_init__(self) -> None:
        rules: dict[str, str | tuple[str, ...]] = {
            "loss": get_args(PreferenceLoss),
            "beta": "at least 0",
            "margin": "at least -1",
            "label_smoothing": "at least 0 and below 0.5",
            "nll": "at least 0",
        }
        problems = check_fields(self, rules, "dpo.")
        if not problems:
            problems += self._without_effect()
        if problems:
            raise ConfigError("Invalid preference training:", problems)

    def _without_effect(self) -> Iterator[Problem]:
        """Yield a problem for each setting without an effect on the loss."""
        if self.margin != -1 and self.loss != "simpo":
            what = f"is {self.margin:g}, and {self.loss} has no margin"
            yield Problem("dpo.margin", what, fix='loss="simpo"')
        if self.label_smoothing and self.loss == "ipo":
            what = f"is {self.label_smoothing:g}, and ipo has no label smoothing"
            yield Problem("dpo.label_smoothing", what, fix='loss="dpo"')

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.loss != "simpo"

    @property
    def scale(self) -> float:
        """β."""
        return self.beta or _BETA[self.loss]

    @property
    def target_margin(self) -> float:
        """γ of SimPO; 0 for other losses."""
        if self.loss != "simpo":
            return 0.0
        if self.margin == -1:
            return _MARGIN
        return self.margin
