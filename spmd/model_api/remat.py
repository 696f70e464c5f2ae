"""Rematerialisation by name: which activations of a layer are kept for the backward pass, the rest recomputed.

| policy | kept from the forward pass of each layer |
|---|---|
| `none` | everything autodiff asks for |
| `selective` | everything but what is inside attention's core (Korthikanti et al., arXiv:2205.05198, section 5) |
| `dots` | the layer's input, and products with a parameter |
| `full` | the layer's input |
| `save:a,b` | the layer's input, and the activations that the model marks `a` and `b` |
| `offload:a,b` | the layer's input, and, in host memory, the activations that the model marks `a` and `b` |
| `save:a offload:b` | both |

A number behind a policy, `full/2`, is an interval: of each two layers the first is under the policy, and the other
keeps everything.

Only `none` keeps parameters as they were gathered over `fsdp`. Under any other policy they are gathered again in the
backward pass, in the layers that an interval leaves out too.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from spmd.errors import ConfigError, Problem, did_you_mean

F = TypeVar("F", bound=Callable)

_PLAIN = ("none", "selective", "dots", "full")
_FORMS = (*_PLAIN, "save:NAME", "offload:NAME")


@dataclasses.dataclass(frozen=True)
class Remat:
    """A rematerialisation policy.

    Args:
        kind: `"none"`, `"selective"`, `"dots"`, `"full"` or `"names"`; `save=` or `offload=` alone imply `"names"`.
        save: Names of activations to keep.
        offload: Names of activations to keep in host memory.
        every: Of this many layers in a row the first is under the policy; the others keep everything.

    Raises:
        ConfigError: All that is wrong with it: an unknown kind, names together with another kind, a name that is both
            saved and offloaded or given twice, an interval that is no interval.

    Example:
        >>> str(Remat(save=("attention_out",), offload=("mlp_hidden",))), str(Remat("full", every=2))
        ('save:attention_out offload:mlp_hidden', 'full/2')
    """

    kind: str = ""
    save: Sequence[str] = ()
    offload: Sequence[str] = ()
    every: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "save", tuple(self.save))
        object.__setattr__(self, "offload", tuple(self.offload))
        if not self.kind:
            object.__setattr__(self, "kind", "names" if self.names else "none")
        if problems := list(self._problems()):
            raise ConfigError("This remat policy cannot be used:", problems)

    def _problems(self) -> Iterator[Problem]:
        if self.kind not in (*_PLAIN, "names"):
            yield Problem("remat", f"{self.kind!r} does not exist", fix=did_you_mean(self.kind, _FORMS))
        elif bool(self.names) != (self.kind == "names"):
            what = f"{self.kind!r} with save={list(self.save)} offload={list(self.offload)}"
            fix = "save:NAME,NAME or offload:NAME,NAME with at least one name, or another policy without names"
            yield Problem("remat", what, fix=fix)
        for name in sorted({name for name in self.names if self.names.count(name) > 1}):
            both = name in self.save and name in self.offload
            what = f"{name} is both saved and offloaded" if both else f"{name} is named twice"
            yield Problem("remat", what, fix="name it once")
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            yield Problem("remat", f"every {self.every!r} layers is no interval", fix="1 or more")
        elif self.kind == "none" and self.every > 1:
            yield Problem("remat", f"'none' in every {self.every} layers is none in all", fix="none")

    @property
    def names(self) -> tuple[str, ...]:
        """The activations that it names, saved and offloaded."""
        return (*self.save, *self.offload)

    def __str__(self) -> str:
        named = [
            f"{word}:{','.join(names)}" for word, names in (("save", self.save), ("offload", self.offload)) if names
        ]
        return " ".join(named or [self.kind]) + (f"/{self.every}" if self.every > 1 else "")

    def apply(self, layer: F, *, scanned: bool) -> F:
        """`layer` under this policy, whatever its interval.

        Args:
            layer: A function of arrays: one layer of the model.
            scanned: Whether it is the body of a `lax.scan`, which already keeps XLA from merging the
                recomputation with the original.
        """
        if self.kind in ("none", "selective"):
            return layer
        return jax.checkpoint(layer, policy=self._saveable(), prevent_cse=not scanned)  # type: ignore[return-value]

    def _saveable(self) -> Callable[..., Any] | None:
        policies = jax.checkpoint_policies
        if self.kind == "dots":
            return policies.dots_with_no_batch_dims_saveable
        if self.offload:
            return policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(self.save),
                names_which_can_be_offloaded=list(self.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
        return policies.save_only_these_names(*self.save) if self.save else None


def make_remat(policy: "str | Remat") -> Remat:
    """The policy as a value: from `"none"`, `"full/2"`, `"save:attention_out offload:mlp_hidden"`, or a `Remat`.

    Raises:
        ConfigError: All that is wrong with it.

    Example:
        >>> make_remat("save:attention_out,mlp_hidden").save
        ('attention_out', 'mlp_hidden')
    """
    if isinstance(policy, Remat):
        return policy
    text, slash, interval = policy.partition("/")
    words: list[str] = []
    names: dict[str, tuple[str, ...]] = {"save": (), "offload": ()}
    for word in text.split():
        head, _, listed = word.partition(":")
        if head in names and (found := tuple(name for name in listed.split(",") if name)):
            names[head] += found
        else:
            words.append(word)  # what is no policy is reported with all the rest
    every = int(interval) if interval.isdecimal() else interval if slash else 1
    return Remat(" ".join(words), names["save"], names["offload"], every)  # type: ignore[arg-type]
