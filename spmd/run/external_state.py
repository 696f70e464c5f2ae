"""Part of the training state outside of checkpoints: it is loaded again from its origin.

A checkpoint records the origin and a digest of the bits, so that a resumed run has the same state
or none.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from spmd import tree
from spmd.checkpoint.tree import OptionalState
from spmd.errors import CheckpointError, Problem
from spmd.resilience.digests import digest_arrays

EXTERNAL_STATE = "reloaded"
"""Key in the record of a checkpoint without that part: its origin and digest."""

S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class ExternalState:
    """Part of a state to load again.

    Attributes:
        path: Such as `variables/base`.
        load: `(origin, abstract)` → the arrays, a tree like `abstract`, which has shapes, dtypes
            and shardings.
        origin: JSON, with a `path` for messages; None if checkpoints are to hold this part.
    """

    path: str
    load: Callable[[Mapping[str, Any], Any], Any]
    origin: Mapping[str, Any] | None = None

    @property
    def optional(self) -> OptionalState:
        """This part as a checkpoint may lack it: abstract arrays take its place."""
        return OptionalState(
            self.path,
            lambda stored, wanted: dict(wanted) if stored else {},
            lambda restored, wanted: {} if restored else dict(wanted),
        )

    def record(self, state: Any) -> dict[str, Any] | None:
        """Return the origin and a digest, for checkpoints; None if they hold this part."""
        if self.origin is None:
            return None
        return {**self.origin, "digest": digest_arrays(self._below(state))}

    def rest(self, state: Any) -> dict[str, Any]:
        """Return the other arrays of a state, by path."""
        below = self._below(state)
        return {path: leaf for path, leaf in tree.flatten(state).items() if path not in below}

    def fill(self, state: S, record: Mapping[str, Any]) -> S:
        """Return a restored state with this part, loaded if the checkpoint lacks it.

        Raises:
            CheckpointError: It cannot be loaded, or has other bits.
        """
        below = self._below(state)
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in below.values()):
            return state
        origin = record.get(EXTERNAL_STATE)
        if not isinstance(origin, Mapping) or not {"path", "digest"} <= origin.keys():
            problem = Problem(self.path, "is missing, and the checkpoint does not say where it is")
            raise CheckpointError("Nothing was restored:", [problem])
        loaded = self._load(origin, tree.branch(state, self.path))
        digest = digest_arrays(loaded)
        if digest != origin["digest"]:
            what = "has not the parameters that it had when this run began"
            detail = f"their digest is {digest}, and was {origin['digest']}"
            problem = Problem(str(origin["path"]), what, detail, "restore the folder as it was")
            raise CheckpointError("Nothing was restored:", [problem])
        filled: S = tree.map_with_path(lambda path, leaf: loaded.get(path, leaf), state)
        return filled

    def _load(self, origin: Mapping[str, Any], abstract: Any) -> dict[str, Any]:
        """Load the arrays, by their paths in the state."""
        loaded = tree.flatten(self.load(origin, abstract))
        return {f"{self.path}/{path}": leaf for path, leaf in loaded.items()}

    def _below(self, state: Any) -> dict[str, Any]:
        return self.optional.below(tree.flatten(state))
