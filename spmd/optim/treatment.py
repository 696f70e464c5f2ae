"""Treatment of each parameter by an optimizer of a config: Muon or AdamW, and whether it decays.

It goes by structure, never by names: `ModelInfo` of the trained model, the user's own rows, and the rank of one layer's
parameter.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.model_api.kernels import LOOKUP, Matrix
from spmd.model_api.model import ModelInfo
from spmd.sharding.layer_paths import Stack, dims_of, names_of, own_stacks, without_dims
from spmd.sharding.rules import matches

Shapes = Mapping[str, Sequence[int]]

_PLAIN = Matrix.of("io")


@dataclasses.dataclass(frozen=True)
class Treatment:
    """Rules of an optimizer about parameters, by their structure.

    Attributes:
        name: The optimizer, such as `"muon"`.
        stacks: The stacks of layers.
        info: That of the trained model; None if it was not given.
        rows: The user's pattern → matrix, or None for a parameter that is no matrix.
        no_decay: Patterns of parameters without weight decay, in place of what structure says; None for that.
        decay: Whether there is any weight decay.
    """

    name: str
    stacks: Mapping[str, Stack]
    info: ModelInfo | None = None
    rows: Mapping[str, Matrix | None] = dataclasses.field(default_factory=dict)
    no_decay: Sequence[str] | None = None
    decay: bool = True

    def decays(self, path: str, rank: int) -> bool:
        """Return whether a parameter decays: by default a kernel of any rank, and no bias, scale or other vector.

        Args:
            path: The parameter.
            rank: The number of its dimensions, as stored.
        """
        if not self.decay:
            return False
        if self.no_decay is not None:
            return not any(matches(pattern, path, self.stacks) for pattern in self.no_decay)
        is_added = self.info is not None and any(name in self.info.added for name in self._names(path))
        return rank - len(dims_of(path, self.stacks)) > 1 and not is_added

    def matrix(self, path: str, rank: int) -> Matrix | None:
        """Return the matrix of one layer's parameter; None if AdamW updates it.

        Args:
            path: The parameter.
            rank: The number of its dimensions in one layer.

        Raises:
            ConfigError: Nobody says what its dimensions are.
        """
        own, _, problem = self._explained(path, rank)
        if problem:
            raise ConfigError("Muon cannot update these parameters:", [problem])
        return own

    def problems(self, shapes: Shapes) -> list[Problem]:
        """Return what is wrong between the rules and all parameters, whose shapes are as stored."""
        if self.name != "muon":
            return []
        problems = []
        matrices = 0
        for path, shape in shapes.items():
            own, _, problem = self._explained(path, len(self._layer(path, shape)))
            problems += [problem] if problem else []
            matrices += own is not None
        for pattern in self.rows:
            if not any(matches(pattern, path, self.stacks) for path in shapes):
                ends = sorted({path.rsplit("/", 1)[-1] for path in shapes})
                fix = did_you_mean(pattern, ends)
                problems.append(Problem(f"matrices[{pattern!r}]", "matches no parameter", fix=fix))
        if not matrices and not problems:
            problems.append(Problem("name", "is muon, and no parameter is a matrix between layers", fix="adamw"))
        return problems

    def describe(self, shapes: Shapes) -> dict[str, str]:
        """Return the path of each parameter → what is not done to all of them: `muon 32 × 64`, `adamw`, `no decay`."""
        described = {}
        for path, shape in shapes.items():
            words = []
            if self.name == "muon":
                layer = self._layer(path, shape)
                own, reason, _ = self._explained(path, len(layer))
                words = [f"muon {own.text(layer)}"] if own else ["adamw", *([reason] if reason else [])]
            if self.decay and not self.decays(path, len(shape)):
                words.append("no decay")
            described[path] = ", ".join(words)
        return described

    def _names(self, path: str) -> tuple[str, ...]:
        return names_of(path, self.stacks)

    def _layer(self, path: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one layer's parameter."""
        return without_dims(shape, dims_of(path, self.stacks))

    def _explained(self, path: str, rank: int) -> tuple[Matrix | None, str, Problem | None]:
        """Return the matrix of a parameter, or else the reason why it is none, or why nobody knows."""
        hits = [pattern for pattern in self.rows if matches(pattern, path, self.stacks)]
        said = self._from_model(path)
        is_said = isinstance(said, Matrix) or said == LOOKUP
        if len(hits) > 1 or (hits and self.rows[hits[0]] is not None and is_said):
            others = " and ".join([f"matrices[{pattern!r}]" for pattern in hits] + (["its layer"] if is_said else []))
            problem = Problem(path, f"is explained by {others}", fix="leave out all but one")
            return None, "", problem
        if hits:
            row = self.rows[hits[0]]
            if row is not None and (max(row.dims) >= rank or rank < 2):
                problem = Problem(path, f"has {rank} dimensions in a layer", f"matrices[{hits[0]!r}] is {row}", "less")
                return None, "", problem
            return row, f"matrices[{hits[0]!r}]" if row is None else "", None
        if isinstance(said, str):
            return None, said, None
        if said is not None or rank < 2:
            return said, "", None
        is_module = self.info is not None and self.info.stacks is not None
        if rank == 2 and (is_module or self._is_repeated(path)):
            return _PLAIN, "", None
        return None, "", self._unexplained(path, rank)

    def _is_repeated(self, path: str) -> bool:
        """Return whether a parameter is of one of several equal layers, so that it is no lookup and no head."""
        return bool(own_stacks(path, self.stacks)) or any(part.isdigit() for part in path.split("/"))

    def _from_model(self, path: str) -> Matrix | str | None:
        """Return the matrix that the model says a parameter is, or the reason why it is none."""
        if self.info is None:
            return None
        for name in self._names(path):
            if name in self.info.no_matrix:
                return self.info.no_matrix[name]
            if name in self.info.added:
                return "added"
            if name in self.info.matrices:
                return self.info.matrices[name]
        return None

    def _unexplained(self, path: str, rank: int) -> Problem:
        end = "/".join(path.split("/")[-2:])
        dims = "(0,), (1,)" if rank == 2 else f"(0,), {(*range(1, rank),)}"
        fix = f'matrices={{"{end}": ({dims})}}: its dimensions of inputs and of outputs; or None for AdamW'
        if self.info is None:
            fix = f"spmd.make_optimizer(config, steps, model=model), or {fix}"
        what = f"has {rank} dimensions in a layer, and nobody says which are inputs and outputs"
        return Problem(path, what, fix=fix)


def read_model(model: Any) -> ModelInfo | None:
    """Return the properties of a model, or of what they are already."""
    if model is None or isinstance(model, ModelInfo):
        return model
    info: ModelInfo = model.info()
    return info
