"""Rematerialisation by name: which activations of a layer are kept for the backward pass, the rest recomputed.

| policy | kept from the forward pass of each layer |
|---|---|
| `none` | everything autodiff asks for |
| `full` | the layer's input only |
| `save:a,b` | the layer's input, and the activations that the model marks `a` and `b` |
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from spmd.errors import ConfigError, Problem, did_you_mean

F = TypeVar("F", bound=Callable)
_KINDS = ("none", "full", "save")


@dataclasses.dataclass(frozen=True)
class Remat:
    """A rematerialisation policy.

    Args:
        kind: `"none"`, `"full"` or `"save"`; `save=` alone implies `"save"`.
        save: Names of activations to keep.

    Raises:
        ConfigError: An unknown kind, or `save` together with another kind.

    Example:
        >>> str(Remat(save=("attention_out",))), str(Remat("full"))
        ('save:attention_out', 'full')
    """

    kind: str = ""
    save: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "save", tuple(self.save))
        if not self.kind:
            object.__setattr__(self, "kind", "save" if self.save else "none")
        if self.kind not in _KINDS:
            fix = did_you_mean(self.kind, ("none", "full", "save:NAME,NAME"))
            raise ConfigError(
                "This remat policy cannot be used:",
                [Problem("remat", f"{self.kind!r} does not exist", fix=fix)],
            )
        if bool(self.save) != (self.kind == "save"):
            what = f"{self.kind!r} with save={list(self.save)}"
            raise ConfigError(
                "This remat policy cannot be used:",
                [Problem("remat", what, fix="none, full, or save:NAME,NAME with at least one name")],
            )

    def __str__(self) -> str:
        return f"save:{','.join(self.save)}" if self.save else self.kind

    def apply(self, layer: F, *, scanned: bool) -> F:
        """`layer` under this policy.

        Args:
            layer: A function of arrays: one layer of the model.
            scanned: Whether it is the body of a `lax.scan`, which already keeps XLA from merging the
                recomputation with the original.
        """
        if self.kind == "none":
            return layer
        policy = jax.checkpoint_policies.save_only_these_names(*self.save) if self.save else None
        return jax.checkpoint(layer, policy=policy, prevent_cse=not scanned)  # type: ignore[return-value]


def make_remat(policy: "str | Remat") -> Remat:
    """The policy as a value: `"none"`, `"full"`, `"save:attention_out,mlp_hidden"`, or a `Remat`.

    Example:
        >>> make_remat("save:attention_out,mlp_hidden").save
        ('attention_out', 'mlp_hidden')
    """
    if isinstance(policy, Remat):
        return policy
    kind, _, names = policy.partition(":")
    return Remat(kind, tuple(name for name in names.split(",") if name))
