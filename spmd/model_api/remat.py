"""Rematerialization policies: the activations of a layer that are saved for the backward pass.

| policy | saved from the forward pass of each layer |
|---|---|
| `none` | everything that autodiff needs |
| `selective` | everything but the inside of the attention core (Korthikanti et al., arXiv:2205.05198, section 5) |
| `dots` | the layer's input, and products with a parameter |
| `full` | the layer's input |
| `save:a,b` | the layer's input, and the activations with the checkpoint names `a` and `b` |
| `offload:a,b` | the same, with `a` and `b` in host memory |
| `save:a offload:b` | both |

A suffix such as `full/2` is an interval: the first of every two layers has the policy, the other saves everything.

Every policy but `none` gathers parameters again in the backward pass, also in the layers that an interval skips.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import jax

from spmd.errors import ConfigError, Problem, did_you_mean

F = TypeVar("F", bound=Callable)

_PLAIN = ("none", "selective", "dots", "full")
_FORMS = (*_PLAIN, "save:NAME", "offload:NAME")


@dataclasses.dataclass(frozen=True)
class Remat:
    """A rematerialization policy.

    Args:
        kind: `"none"`, `"selective"`, `"dots"`, `"full"` or `"names"`; `save=` or `offload=` imply `"names"`.
        save: Checkpoint names of activations to save.
        offload: Checkpoint names of activations to save in host memory.
        every: The interval in layers.

    Raises:
        ConfigError: All problems of the policy.

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
            yield Problem("remat", f"{self.every!r} is not an interval of layers", fix="1 or more")
        elif self.kind == "none" and self.every > 1:
            yield Problem("remat", f"'none' saves everything, and has an interval of {self.every}", fix="none")

    def check_names(self, known: Collection[str], what: str) -> list[Problem]:
        """Return a problem for each checkpoint name that is not known; `what` says so."""
        return [
            Problem(f"remat {word}:{name}", what, fix=f"one of: {', '.join(known)}")
            for word, names in (("save", self.save), ("offload", self.offload))
            for name in names
            if name not in known
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoint names, saved and offloaded."""
        return (*self.save, *self.offload)

    def __str__(self) -> str:
        lists = {"save": self.save, "offload": self.offload}
        named = [f"{word}:{','.join(names)}" for word, names in lists.items() if names]
        return " ".join(named or [self.kind]) + (f"/{self.every}" if self.every > 1 else "")

    def apply(self, layer: F, *, scanned: bool) -> F:
        """Apply the policy to one layer, a function of arrays, whatever the interval.

        A `scanned` layer is the body of a `lax.scan`, which already keeps XLA from merging the recomputation with the
        original.
        """
        if self.kind in ("none", "selective"):
            return layer
        policies, policy = jax.checkpoint_policies, None
        if self.kind == "dots":
            policy = policies.dots_with_no_batch_dims_saveable
        elif self.offload:
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(self.save),
                names_which_can_be_offloaded=list(self.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
        elif self.save:
            policy = policies.save_only_these_names(*self.save)
        return jax.checkpoint(layer, policy=policy, prevent_cse=not scanned)  # type: ignore[return-value]


def make_remat(policy: "str | Remat") -> Remat:
    """Parse a policy such as `"none"`, `"full/2"` or `"save:attention_out offload:mlp_hidden"`; a `Remat` is returned.

    Example:
        >>> make_remat("save:attention_out,mlp_hidden").save
        ('attention_out', 'mlp_hidden')
    """
    if isinstance(policy, Remat):
        return policy
    text, slash, interval = str(policy).partition("/")
    words: list[str] = []
    names: dict[str, tuple[str, ...]] = {"save": (), "offload": ()}
    for word in text.split():
        head, _, listed = word.partition(":")
        if head in names and (found := tuple(name for name in listed.split(",") if name)):
            names[head] += found
        else:
            words.append(word)  # `Remat` reports an invalid word with all other problems
    every = int(interval) if interval.isdecimal() else interval if slash else 1
    return Remat(" ".join(words), names["save"], names["offload"], every)  # type: ignore[arg-type]
