"""Treatment of each parameter by an optimizer of a config: Muon or AdamW, and whether it decays.

It goes by structure, never by names: `ModelInfo` of the trained model, the user's own rows, and the
rank of one layer's parameter.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.model_interface.kernels import LOOKUP, Matrix
from spmd.model_interface.model import ModelInfo
from spmd.sharding.layer_paths import Stack, dims_of, names_of, own_stacks, without_dims
from spmd.sharding.rules import matches

Shapes = Mapping[str, Sequence[int]]

ADDED = "added"
"""The reason of a parameter that its layer adds, or multiplies by."""

_PLAIN = Matrix.of("io")


@dataclasses.dataclass(frozen=True)
class Treatment:
    """Rules of an optimizer about parameters, by their structure.

    Attributes:
        name: The optimizer, such as `"muon"`.
        stacks: The stacks of layers.
        info: The structure of the trained model; None if it was not given.
        rows: The user's pattern → matrix, or None for a parameter that is no matrix.
        no_decay: Patterns of parameters without weight decay, in place of the choice by structure;
            None for that choice.
        decay: Whether there is any weight decay.
    """

    name: str
    stacks: Mapping[str, Stack]
    info: ModelInfo | None = None
    rows: Mapping[str, Matrix | None] = dataclasses.field(default_factory=dict)
    no_decay: Sequence[str] | None = None
    decay: bool = True

    @property
    def orthogonalizes(self) -> bool:
        """Whether matrices are updated whole, by their owners."""
        return self.name == "muon"

    @property
    def has_rates(self) -> bool:
        """Whether the model multiplies learning rates."""
        return self.info is not None and bool(self.info.rates)

    def decays(self, path: str, rank: int) -> bool:
        """Return whether a parameter decays.

        By default a kernel of any rank does, and no bias, scale or other vector.

        Args:
            path: The parameter.
            rank: The number of its dimensions, as stored.
        """
        if not self.decay:
            return False
        if self.no_decay is not None:
            return not any(matches(pattern, path, self.stacks) for pattern in self.no_decay)
        layer_rank = rank - len(dims_of(path, self.stacks))
        return layer_rank > 1 and not self._is_added(path)

    def rate(self, path: str) -> float:
        """Return the factor of a parameter's learning rate by its model."""
        if self.info is None:
            return 1.0
        return self.info.rates.get(path, 1.0)

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
        """Return the contradictions between the rules and all parameters; shapes are as stored."""
        if not self.orthogonalizes:
            return []
        problems = []
        matrices = 0
        for path, shape in shapes.items():
            own, _, problem = self._explained(path, len(self._layer(path, shape)))
            if problem:
                problems.append(problem)
            if own is not None:
                matrices += 1
        problems += self._unmatched_rows(shapes)
        if not matrices and not problems:
            what = "is muon, and no parameter is a matrix between layers"
            problems.append(Problem("name", what, fix="adamw"))
        return problems

    def _unmatched_rows(self, paths: Collection[str]) -> list[Problem]:
        """Return a problem for each of the user's patterns without a matching parameter."""
        problems = []
        for pattern in self.rows:
            if any(matches(pattern, path, self.stacks) for path in paths):
                continue
            last_components = {path.rsplit("/", 1)[-1] for path in paths}
            fix = did_you_mean(pattern, sorted(last_components))
            problems.append(Problem(f"matrices[{pattern!r}]", "matches no parameter", fix=fix))
        return problems

    def describe(self, shapes: Shapes) -> dict[str, str]:
        """Return parameter → its exceptions in words: `muon 32 × 64`, `adamw`, `no decay`."""
        described = {}
        for path, shape in shapes.items():
            words = []
            if self.orthogonalizes:
                words += self._describe_muon(path, shape)
            if self.decay and not self.decays(path, len(shape)):
                words.append("no decay")
            if self.rate(path) != 1:
                words.append(f"rate × {self.rate(path):.4g}")
            described[path] = ", ".join(words)
        return described

    def _describe_muon(self, path: str, shape: Sequence[int]) -> list[str]:
        """Return the matrices of a parameter in words, or `adamw` and its reason, if any."""
        layer = self._layer(path, shape)
        own, reason, _ = self._explained(path, len(layer))
        if own:
            return [f"muon {own.text(layer)}"]
        if reason:
            return ["adamw", reason]
        return ["adamw"]

    def _names(self, path: str) -> tuple[str, ...]:
        return names_of(path, self.stacks)

    def _layer(self, path: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of one layer's parameter."""
        return without_dims(shape, dims_of(path, self.stacks))

    def _is_added(self, path: str) -> bool:
        """Return whether the model's layer adds a parameter to a product, or scales one by it."""
        if self.info is None:
            return False
        return any(name in self.info.added for name in self._names(path))

    def _explained(self, path: str, rank: int) -> tuple[Matrix | None, str, Problem | None]:
        """Return the matrix of a parameter, the reason against one, or the problem."""
        hits = [pattern for pattern in self.rows if matches(pattern, path, self.stacks)]
        said = self._from_model(path)
        problem = self._explained_twice(path, hits, said)
        if problem:
            return None, "", problem
        if hits:
            return self._from_row(hits[0], path, rank)
        if isinstance(said, str):
            return None, said, None
        if said is not None or rank < 2:
            return said, "", None
        is_module = self.info is not None and self.info.stacks is not None
        if rank == 2 and (is_module or self._is_repeated(path)):
            return _PLAIN, "", None
        return None, "", self._unexplained(path, rank)

    def _explained_twice(
        self, path: str, hits: Sequence[str], said: Matrix | str | None
    ) -> Problem | None:
        """Return a problem if two rows, or a row and the model, explain one parameter."""
        is_said = isinstance(said, Matrix) or said == LOOKUP
        # a row may say: no matrix after all
        is_corrected = bool(hits) and self.rows[hits[0]] is None
        contradicts_model = bool(hits) and is_said and not is_corrected
        if len(hits) < 2 and not contradicts_model:
            return None
        sources = [f"matrices[{pattern!r}]" for pattern in hits]
        if is_said:
            sources.append("its layer")
        what = f"is explained by {' and '.join(sources)}"
        return Problem(path, what, fix="leave out all but one")

    def _from_row(
        self, pattern: str, path: str, rank: int
    ) -> tuple[Matrix | None, str, Problem | None]:
        """Return the result of `_explained` for a parameter with one matching row of the user's."""
        where = f"matrices[{pattern!r}]"
        matrix = self.rows[pattern]
        if matrix is None:
            return None, where, None
        if max(matrix.dims) >= rank or rank < 2:
            what = f"has {rank} dimensions in a layer"
            return None, "", Problem(path, what, f"{where} is {matrix}", "less")
        return matrix, "", None

    def _is_repeated(self, path: str) -> bool:
        """Return whether several equal layers have the parameter; then it is no lookup or head."""
        if own_stacks(path, self.stacks):
            return True
        return any(part.isdigit() for part in path.split("/"))

    def _from_model(self, path: str) -> Matrix | str | None:
        """Return the matrix of a parameter by the model, or its reason against one."""
        if self.info is None:
            return None
        return declared(path, self.info, self.stacks)

    def _unexplained(self, path: str, rank: int) -> Problem:
        end = "/".join(path.split("/")[-2:])
        dims = "(0,), (1,)"
        if rank > 2:
            dims = f"(0,), {tuple(range(1, rank))}"
        rows = f'matrices={{"{end}": ({dims})}}'
        fix = f"{rows}: its dimensions of inputs and of outputs; or None for AdamW"
        if self.info is None:
            fix = f"spmd.make_optimizer(config, steps, model=model), or {fix}"
        what = f"has {rank} dimensions in a layer, and nobody says which are inputs and outputs"
        return Problem(path, what, fix=fix)


def declared(path: str, info: ModelInfo, stacks: Mapping[str, Stack]) -> Matrix | str | None:
    """Return the matrix of a parameter by its layer's declaration, or a reason against one.

    The reasons are those of `ModelInfo.no_matrix`, and `ADDED`. None: nothing.
    """
    for name in names_of(path, stacks):
        if name in info.no_matrix:
            return info.no_matrix[name]
        if name in info.added:
            return ADDED
        if name in info.matrices:
            return info.matrices[name]
    return None


def read_model(model: Any) -> ModelInfo | None:
    """Return the properties of a model; properties and None stay as they are."""
    if model is None or isinstance(model, ModelInfo):
        return model
    info: ModelInfo = model.info()
    return info
