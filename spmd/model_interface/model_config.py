"""Optional numbers of a model's config, each a protocol of one property.

`spmd.run.config.ModelConfig` is what every config has. A config that has one of these properties
too, as a field or computed, is checked, searched and timed with it; for one without it, the
functions here return the value that makes no difference.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasVocab(Protocol):
    """A config with a vocabulary."""

    @property
    def vocab(self) -> int:
        """Vocabulary size."""


@runtime_checkable
class HasContext(Protocol):
    """A config with a longest sequence."""

    @property
    def context(self) -> int | None:
        """Positions of the longest sequence; None without a limit."""


@runtime_checkable
class HasLayers(Protocol):
    """A config with a number of layers, to divide among the stages of a pipeline."""

    @property
    def layers(self) -> int:
        """Number of layers."""


class LayerPattern(Protocol):
    """Kinds of layers in order: first ones, a repeated group, and last ones."""

    @property
    def first(self) -> tuple[Any, ...]:
        """Kinds of the first layers, which are not repeated."""

    @property
    def group(self) -> tuple[Any, ...]:
        """Kinds of the layers of the repeated group."""

    @property
    def repeats(self) -> int:
        """Number of repeats of the group."""

    @property
    def last(self) -> tuple[Any, ...]:
        """Kinds of the last layers, which are not repeated."""


@runtime_checkable
class HasPattern(Protocol):
    """A config with layers of several kinds; a pipeline divides the repeats of their group."""

    @property
    def pattern(self) -> LayerPattern:
        """The kinds in order."""


@runtime_checkable
class HasHeads(Protocol):
    """A config with attention heads, to divide over `tensor`."""

    @property
    def heads(self) -> int:
        """Number of query heads."""


@runtime_checkable
class HasKVHeads(Protocol):
    """A config with fewer heads of keys and values than of queries."""

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""


@runtime_checkable
class HasKVWidth(Protocol):
    """A config with keys and values of another width than queries."""

    @property
    def kv_width(self) -> int:
        """Total width of the heads of keys."""


@runtime_checkable
class HasHeadWidth(Protocol):
    """A config with a width of query heads, also beside layers without attention."""

    @property
    def head_width(self) -> int:
        """Width of a query head in layers with attention; 0 without any."""


@runtime_checkable
class HasWidth(Protocol):
    """A config with a width."""

    @property
    def d_model(self) -> int:
        """Width of the residual stream; 0 if it is not known."""


@runtime_checkable
class HasHiddenWidth(Protocol):
    """A config with a width of feed-forward layers."""

    @property
    def d_ff(self) -> int:
        """Hidden units of a feed-forward layer, or of one expert."""


@runtime_checkable
class HasWindow(Protocol):
    """A config with one attention window for all layers."""

    @property
    def window(self) -> int:
        """Tokens seen by a query; 0 for all before it."""


@runtime_checkable
class HasWindows(Protocol):
    """A config with an attention window for each layer."""

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of consecutive layers, repeated; empty for `window`."""


@runtime_checkable
class HasRouter(Protocol):
    """A config with experts."""

    @property
    def router(self) -> Any:
        """A `spmd.layers.router.RouterConfig`; None for no experts."""


@runtime_checkable
class HasExperts(Protocol):
    """A router's config with a number of experts."""

    @property
    def experts(self) -> int:
        """Number of experts of a layer."""


@runtime_checkable
class ReadsEarlierRecords(Protocol):
    """A config that replaces earlier classes, whose records are still read."""

    @property
    def earlier_kinds(self) -> tuple[str, ...]:
        """Names of the earlier classes."""

    def from_earlier(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the recorded values that have a field today, by its name."""


def earlier_kinds_of(config: Any) -> tuple[str, ...]:
    """Return the names of earlier classes of a config."""
    if isinstance(config, ReadsEarlierRecords):
        return config.earlier_kinds
    return ()


def recorded_values(config: Any, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return recorded values of a config, perhaps of an earlier class, by the fields of today."""
    if isinstance(config, ReadsEarlierRecords):
        return config.from_earlier(values)
    return values


def context_of(config: Any) -> int | None:
    """Return the longest sequence of a model, in tokens; None without a limit."""
    if isinstance(config, HasContext) and not isinstance(config, type):
        return config.context
    return None


def layers_of(config: Any) -> int:
    """Return the number of layers of a config, or 1."""
    if isinstance(config, HasLayers):
        return config.layers
    return 1


def repeats_of(config: Any) -> int:
    """Return the number of equal groups of layers, to divide among stages; 1 if it is unknown.

    Example:
        >>> import types
        >>> pattern = types.SimpleNamespace(first=(), group=("local", "global"), repeats=4, last=())
        >>> repeats_of(types.SimpleNamespace(layers=8, pattern=pattern))
        4
        >>> repeats_of(types.SimpleNamespace(layers=8))
        8
    """
    if isinstance(config, HasPattern):
        return config.pattern.repeats
    return layers_of(config)


def heads_of(config: Any) -> tuple[int, int]:
    """Return the number of query heads, or 1, and of heads of keys and values, or as many.

    Example:
        >>> import types
        >>> heads_of(types.SimpleNamespace(heads=8, kv_heads=2)), heads_of(None)
        ((8, 2), (1, 1))
    """
    heads = 1
    if isinstance(config, HasHeads):
        heads = config.heads
    if isinstance(config, HasKVHeads):
        return heads, config.kv_heads
    return heads, heads


def router_of(config: Any) -> Any:
    """Return the router's config, or None."""
    if isinstance(config, HasRouter):
        return config.router
    return None


def experts_of(config: Any) -> int:
    """Return the number of experts of a layer, or 1."""
    router = router_of(config)
    if isinstance(router, HasExperts):
        return router.experts
    return 1


def windows_of(config: Any) -> tuple[int, ...]:
    """Return the attention windows of consecutive layers, repeated; 0 for all tokens before.

    Example:
        >>> import types
        >>> windows_of(types.SimpleNamespace(windows=(64, 0), window=8)), windows_of(None)
        ((64, 0), (0,))
    """
    if isinstance(config, HasWindows) and config.windows:
        return config.windows
    if isinstance(config, HasWindow):
        return (config.window,)
    return (0,)
