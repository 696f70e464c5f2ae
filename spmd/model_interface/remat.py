"""Rematerialization policies: the saved activations of a layer for the backward pass.

| policy | saved from the forward pass of each layer |
|---|---|
| `none` | everything that autodiff needs |
| `selective` | everything but the inside of the attention core |
| `dots` | the layer's input, and products with a parameter |
| `full` | the layer's input |
| `save:a,b` | the layer's input, and the activations with the checkpoint names `a` and `b` |
| `offload:a,b` | the same, with `a` and `b` in host memory |
| `save:a offload:b` | both |
| `store:int8=a` | the layer's input, and `a` in 8 bits (`int8`, `fp8`), or 1 (`mask`) |
| `store:int8=a offload:a` | the same, with the codes of `a` in host memory |

`selective` is from Korthikanti et al. (arXiv:2205.05198, section 5). The codecs of `store` are in
`spmd.codecs`.

The forward pass computes with a stored activation in full; only the backward pass has the decoded
one (Gist's delayed precision reduction, Jain et al., ISCA 2018).

A suffix such as `full/2` is an interval: the first of every two layers has the policy, the other
saves everything.

Every policy but `none` gathers parameters again in the backward pass, also in the layers that an
interval skips.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from spmd.codecs import CODECS, Codec
from spmd.errors import ConfigError, Problem, did_you_mean
from spmd.jaxpr.upgrades import checkpoints_ignore_functions

F = TypeVar("F", bound=Callable)

CHOICE = "router_choice"
"""Checkpoint name of a layer's decisions, such as its tokens' experts. Policies with names save
these too: recomputed from a decoded activation, a decision could differ, and activations saved in
the forward pass would belong to other tokens."""
_PLAIN = ("none", "selective", "dots", "full")
_FORMS = (*_PLAIN, "save:NAME", "offload:NAME", "store:CODEC=NAME")


@dataclasses.dataclass(frozen=True)
class Remat:
    """A rematerialization policy.

    Args:
        kind: `"none"`, `"selective"`, `"dots"`, `"full"` or `"names"`; names imply `"names"`.
        save: Checkpoint names of activations to save.
        offload: Checkpoint names of activations to save in host memory.
        every: The interval in layers.
        store: Checkpoint name → codec, or such pairs. A name that is also in `offload` has its
            codes in host memory.

    Raises:
        ConfigError: All problems of the policy.

    Example:
        >>> str(Remat(save=("attention_out",), offload=("mlp_hidden",)))
        'save:attention_out offload:mlp_hidden'
        >>> str(Remat("full", every=2))
        'full/2'
    """

    kind: str = ""
    save: Sequence[str] = ()
    offload: Sequence[str] = ()
    every: int = 1
    store: Mapping[str, str] | Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "save", tuple(self.save))
        object.__setattr__(self, "offload", tuple(self.offload))
        pairs = self.store.items() if isinstance(self.store, Mapping) else self.store
        object.__setattr__(self, "store", tuple((str(name), str(codec)) for name, codec in pairs))
        if not self.kind:
            object.__setattr__(self, "kind", "names" if self.names else "none")
        problems = [*self._kind_problems(), *self._name_problems(), *self._interval_problems()]
        if problems:
            raise ConfigError("Invalid remat policy:", problems)

    def _kind_problems(self) -> Iterator[Problem]:
        """Yield a problem if the kind does not exist, or does not match the names."""
        if self.kind not in (*_PLAIN, "names"):
            fix = did_you_mean(self.kind, _FORMS)
            yield Problem("remat", f"{self.kind!r} does not exist", fix=fix)
        elif bool(self.names) != (self.kind == "names"):
            what = f"{self.kind!r} with save={list(self.save)} offload={list(self.offload)}"
            if self.store:
                what += f" store={dict(self._pairs)}"
            fix = (
                "save:NAME,NAME or offload:NAME,NAME with at least one name, or another policy "
                "without names"
            )
            yield Problem("remat", what, fix=fix)

    def _name_problems(self) -> Iterator[Problem]:
        """Yield a problem for each unknown codec, and for each name in two places."""
        codecs = {codec for _, codec in self._pairs}
        for codec in sorted(codecs - set(CODECS)):
            yield Problem("remat", f"store:{codec}= is no codec", fix=did_you_mean(codec, CODECS))
        lists: dict[str, Sequence[str]] = {
            "saved": self.save,
            "offloaded": self.offload,
            "stored": [name for name, _ in self._pairs],
        }
        for name in dict.fromkeys(self.names):
            classes = [word for word, names in lists.items() if name in names]
            counts = [list(names).count(name) for names in lists.values()]
            if len(classes) > 1 and "saved" in classes:
                what = f"{name} is both {' and '.join(classes)}"
                yield Problem("remat", what, fix="name it once")
            elif max(counts) > 1:
                yield Problem("remat", f"{name} is named twice", fix="name it once")

    def _interval_problems(self) -> Iterator[Problem]:
        """Yield a problem if the interval is no number of layers, or has no effect."""
        is_number = isinstance(self.every, int) and not isinstance(self.every, bool)
        if not is_number or self.every < 1:
            what = f"{self.every!r} is not an interval of layers"
            yield Problem("remat", what, fix="1 or more")
        elif self.kind == "none" and self.every > 1:
            what = f"'none' saves everything, and has an interval of {self.every}"
            yield Problem("remat", what, fix="none")

    def check_names(self, known: Collection[str], what: str) -> list[Problem]:
        """Return a problem for each unknown checkpoint name.

        `what` is the text of the problem: that the name is unknown.
        """
        fix = f"one of: {', '.join(known)}"
        problems = []
        for word, names in self._lists.items():
            for name in names:
                if name not in known:
                    problems.append(Problem(f"remat {word}{name}", what, fix=fix))
        return problems

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoint names: saved, offloaded and stored."""
        names = dict.fromkeys(itertools.chain(*self._lists.values()))
        return tuple(names)

    def codec(self, name: str) -> Codec | None:
        """Return the codec of an activation; None without one."""
        codecs = dict(self._pairs)
        if name not in codecs:
            return None
        return CODECS[codecs[name]]

    @property
    def _pairs(self) -> tuple[tuple[str, str], ...]:
        return self.store  # type: ignore[return-value]

    @property
    def _lists(self) -> dict[str, Sequence[str]]:
        """The words of the policy with their names, such as `save:` and `store:int8=`."""
        stored: dict[str, Sequence[str]] = {}
        for name, codec in self._pairs:
            word = f"store:{codec}="
            stored[word] = (*stored.get(word, ()), name)
        return {"save:": self.save, **stored, "offload:": self.offload}

    def __str__(self) -> str:
        words = []
        for word, names in self._lists.items():
            if names:
                words.append(word + ",".join(names))
        text = " ".join(words) or self.kind
        if self.every > 1:
            text += f"/{self.every}"
        return text

    def apply(self, layer: F, *, scanned: bool, also: tuple[str, ...] = ()) -> F:
        """Apply the policy to one layer, a function of arrays, whatever the interval.

        A `scanned` layer is the body of a `lax.scan`, which already keeps XLA from merging the
        recomputation with the original. Checkpoint names in `also` are saved too.

        Raises:
            ConfigError: JAX would ignore the policy, under an upgrade flag with incomplete support.
        """
        if self.kind in ("none", "selective"):
            return layer
        if self.names:
            also = (*also, CHOICE)
        self._check_upgrades(also)
        policy = self._policy(also)
        checkpointed: Any = jax.checkpoint(layer, policy=policy, prevent_cse=not scanned)
        return checkpointed

    def _policy(self, also: tuple[str, ...]) -> Callable[..., Any] | None:
        """Return the policy of `jax.checkpoint`; None saves the layer's input alone."""
        policies = jax.checkpoint_policies
        saved = (*self.save, *also)
        offloaded = [name for name in self.offload if self.codec(name) is None]
        policy = None
        if self.kind == "dots":
            policy = policies.dots_with_no_batch_dims_saveable
            if also:
                by_name = policies.save_only_these_names(*also)
                policy = policies.save_from_both_policies(policy, by_name)
        elif offloaded:
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(saved),
                names_which_can_be_offloaded=offloaded,
                offload_src="device",
                offload_dst="pinned_host",
            )
        elif saved:
            policy = policies.save_only_these_names(*saved)
        if self.store:
            policy = policies.save_from_both_policies(_is_stored, policy)
        return policy

    def _check_upgrades(self, also: tuple[str, ...]) -> None:
        """Raise ConfigError if JAX would ignore the policy under `jax_remat3`."""
        is_function = self.offload or self.store or (self.kind == "dots" and also)
        if not is_function or not checkpoints_ignore_functions():
            return
        problem = Problem(
            f"remat {self}",
            f"would be ignored: JAX {jax.__version__} recomputes everything under jax_remat3",
            fix="turn jax_remat3 off, use a newer JAX, or save:NAME,NAME",
        )
        title = "JAX cannot apply this remat policy under its upgrade flags:"
        raise ConfigError(title, [problem])


def _is_stored(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether a primitive is `stored` of `spmd.plan.compressed_activations`."""
    return primitive.name == "stored"


def make_remat(policy: "str | Remat") -> Remat:
    """Parse a policy such as `"none"`, `"full/2"` or `"save:attention_out offload:mlp_hidden"`.

    A `Remat` is returned as it is.

    Example:
        >>> make_remat("save:attention_out,mlp_hidden").save
        ('attention_out', 'mlp_hidden')
        >>> make_remat("store:int8=mlp_gate offload:mlp_gate").store
        (('mlp_gate', 'int8'),)
    """
    if isinstance(policy, Remat):
        return policy
    text, slash, interval = str(policy).partition("/")
    words: list[str] = []
    names: dict[str, tuple[str, ...]] = {"save": (), "offload": ()}
    store: tuple[tuple[str, str], ...] = ()
    for word in text.split():
        head, _, listed = word.partition(":")
        codec = ""
        if head == "store":
            codec, _, listed = listed.partition("=")
        found = tuple(name for name in listed.split(",") if name)
        if found and head in names:
            names[head] += found
        elif found and head == "store":
            store += tuple((name, codec) for name in found)
        else:
            words.append(word)  # `Remat` reports an invalid word with all other problems
    every: Any = 1
    if interval.isdecimal():
        every = int(interval)
    elif slash:
        every = interval
    return Remat(" ".join(words), names["save"], names["offload"], every, store)
