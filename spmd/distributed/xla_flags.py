"""XLA flags of each platform, and with those of each chip (`Chip.flags`), each with its reason.

They are passed to the compiler with the train step, as compile options, so an unknown name is an
error. A flag of the preset that is set in the environment has the user's value.
docs/how-to/slow-networks.md shows the effect of each flag.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from spmd.chips import Flag, Value, chip_of
from spmd.errors import ConfigError, Problem, did_you_mean

PRESET = "preset"
"""Word for the flags of this module in the config's list of flags."""

QUICK = "quick"
"""Word for the same flags, but those that lengthen compilation."""

_SCHEDULER = (
    "latency-hiding scheduler: orders the program so that it computes while collectives run"
)
_COMBINE = "combines all-reduces of gradients up to 256 MiB: the slow network has long latencies"

PRESETS: Mapping[str, tuple[Flag, ...]] = {
    "cpu": (),
    "tpu": (Flag("xla_tpu_enable_latency_hiding_scheduler", True, _SCHEDULER),),
    "cuda": (Flag("xla_gpu_enable_latency_hiding_scheduler", True, _SCHEDULER),),
}
"""Platform → flags of every step."""

CROSSING: Mapping[str, tuple[Flag, ...]] = {
    "cpu": (),
    "tpu": (Flag("xla_tpu_dcn_all_reduce_combiner_threshold_bytes", 256 * 2**20, _COMBINE),),
    "cuda": (Flag("xla_gpu_all_reduce_combine_threshold_bytes", 256 * 2**20, _COMBINE),),
}
"""Platform → flags added if a mesh axis crosses the slow network."""


def flags_for(
    configured: Iterable[str],
    platform: str,
    kind: str = "",
    *,
    crossing: bool,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Flag, ...]:
    """Return the flags of a step, from words `"preset"`, `"quick"` or `"NAME=VALUE"` of a config.

    The last value of a name counts.

    Args:
        kind: Kind of the device, as JAX names it.
        crossing: True if a mesh axis crosses the slow network.
        environment: Flags that are set in the environment; they count instead of the preset's.

    Raises:
        ConfigError: Config and environment have different values of a flag.

    Example:
        >>> configured = ["preset", "xla_gpu_enable_pipelined_all_gather=false"]
        >>> print(*flags_for(configured, "cuda", crossing=False), sep="\\n")
        xla_gpu_enable_latency_hiding_scheduler=true
        xla_gpu_enable_pipelined_all_gather=false
    """
    platform = known_platform(platform)
    preset = PRESETS[platform] + chip_of(kind).flags + (CROSSING[platform] if crossing else ())
    chosen: dict[str, Flag] = {}
    problems: list[Problem] = []
    for text in configured:
        if text in (PRESET, QUICK):
            for flag in preset:
                if text == PRESET or not flag.lengthens:
                    chosen[flag.name] = _as_set_by_user(flag, environment)
            continue
        flag = _parse_flag(text)
        problems += _contradictions(flag, environment)
        chosen[flag.name] = flag
    if problems:
        raise ConfigError("Contradicting XLA flags:", problems)
    return tuple(chosen.values())


def _as_set_by_user(flag: Flag, environment: Mapping[str, str]) -> Flag:
    """Return a flag of the preset with the user's value, if there is one.

    XLA takes compile options before the environment, so a flag without an option is not enough.
    """
    if flag.name not in environment:
        return flag
    written = _parse_flag(f"{flag.name}={environment[flag.name]}")
    reason = f"set in the environment; the preset has {flag}: {flag.reason}"
    return dataclasses.replace(written, reason=reason)


def _contradictions(flag: Flag, environment: Mapping[str, str]) -> list[Problem]:
    """Return a problem if a flag of the config has another value in the environment."""
    if flag.name not in environment:
        return []
    other = _parse_flag(f"{flag.name}={environment[flag.name]}")
    if other.value == flag.value:
        return []
    what = f"has {flag}, and the environment (XLA_FLAGS, LIBTPU_INIT_ARGS) {other}"
    return [Problem("xla", what, fix="remove one of them")]


def known_platform(platform: str) -> str:
    """Return the tables' name of a platform: GPUs of AMD take the same flags as NVIDIA's."""
    if platform in ("gpu", "rocm"):
        return "cuda"
    return platform


def compiler_options(flags: Iterable[Flag]) -> dict[str, Value]:
    """Return the flags as `jax.stages.Lowered.compile` takes them."""
    return {flag.name: flag.value for flag in flags}


def flag_problems(configured: Iterable[str]) -> list[Problem]:
    """Return the problems of a config's flags; unknown names are left to the compiler.

    Example:
        >>> print(*flag_problems(["preset", "xla_a=1", "prset"]))
        xla: is 'prset'
            fix: did you mean "preset"?
    """
    wrong = [
        text
        for text in configured
        if text not in (PRESET, QUICK) and not (text.startswith("xla_") and "=" in text)
    ]
    return [
        Problem("xla", f"is {text!r}", fix=did_you_mean(text, (PRESET, QUICK, "xla_NAME=VALUE")))
        for text in wrong
    ]


def describe(title: str, flags: Iterable[Flag]) -> str:
    """Return the title, and two lines for each flag: value and reason."""
    return "".join([f"{title}\n", *(f"  {flag}\n      {flag.reason}\n" for flag in flags)])


def _parse_flag(text: str) -> Flag:
    name, _, written = text.partition("=")
    value: Value = {"true": True, "false": False}.get(written, written)
    for kind in (float, int):
        with contextlib.suppress(ValueError):
            value = kind(written)
    return Flag(name, value, "set in the config")
