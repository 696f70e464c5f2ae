"""Limits of the gradients of activations: the text `residual=1,mlp_hidden=0.5`."""

import math
from collections.abc import Collection, Iterator, Mapping

from flax.core import FrozenDict

from spmd.errors import Problem, did_you_mean

_LEAST = 1e-30  # float32 has its inverse
_FORM = "NAME=NORM,NAME=NORM with names of activations, such as residual=1"


def parse_clips(text: str) -> Mapping[str, float]:
    """Return activation → the largest norm of a token's gradient, of a text without problems."""
    clips = {}
    for row in filter(None, text.split(",")):
        name, _, limit = row.partition("=")
        clips[name.strip()] = float(limit)
    return FrozenDict(clips)


def form_problems(text: str) -> Iterator[Problem]:
    """Yield a problem for each row of another form, and for each repeated name."""
    names = set()
    for row in filter(None, text.split(",")):
        name, _, limit = row.partition("=")
        if not name.strip() or not _is_positive(limit):
            yield Problem("clip_activations", f"has {row!r}", fix=_FORM)
        elif name.strip() in names:
            yield Problem("clip_activations", f"has {name.strip()} twice", fix=_FORM)
        names.add(name.strip())


def name_problems(clips: Mapping[str, float], activations: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each name without an activation in the rule table."""
    for name in clips:
        if name not in activations:
            fix = did_you_mean(name, activations)
            yield Problem(
                "clip_activations", f"has {name}, no activation of the rule table", fix=fix
            )


def clips_text(clips: Mapping[str, float]) -> str:
    """Return limits as `parse_clips` reads them.

    Example:
        >>> clips_text(parse_clips("residual=1,mlp_hidden=0.50"))
        'residual=1,mlp_hidden=0.5'
    """
    return ",".join(f"{name}={limit:g}" for name, limit in clips.items())


def _is_positive(text: str) -> bool:
    try:
        number = float(text)
    except ValueError:
        return False
    return number >= _LEAST and math.isfinite(number)
