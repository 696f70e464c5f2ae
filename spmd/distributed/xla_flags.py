"""What XLA is told beside the program: flags for each platform, as data, each with the reason for it.

They are given to the compiler with the train step, as compile options, so no variable of the environment is set, and an
unknown name is an error. What can only be said when a process starts is in `START_UP`: `spmd plan` prints the line to
export, and `spmd script` writes it.

What each of them changes, as the compilers for absent machines say, is in docs/how-to/slow-networks.md.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from spmd.errors import Problem, did_you_mean

PRESET = "preset"
"""The word for the flags of this room, where a config lists flags."""

Value = bool | int | float | str
"""As XLA takes them; the text `true` is not the truth value."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag, or one variable of the environment.

    Attributes:
        name: As XLA knows it, without dashes.
        value: What it is set to.
        reason: Why, in one line.

    Example:
        >>> print(Flag("xla_gpu_enable_latency_hiding_scheduler", True, "sends while it computes"))
        xla_gpu_enable_latency_hiding_scheduler=true
    """

    name: str
    value: Value
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={str(self.value).lower() if isinstance(self.value, bool) else self.value}"


PRESETS: Mapping[str, tuple[Flag, ...]] = {
    "cpu": (),
    "tpu": (
        Flag(
            "xla_tpu_enable_latency_hiding_scheduler",
            True,
            "orders the program so that matmuls stand between the start and the end of what is sent",
        ),
        Flag(
            "xla_tpu_enable_async_collective_fusion",
            True,
            "joins a gather with the matmuls that run meanwhile, so that parameters arrive as layers compute",
        ),
    ),
    "cuda": (
        Flag(
            "xla_gpu_enable_latency_hiding_scheduler",
            True,
            "orders the program so that kernels run between the start and the end of what is sent",
        ),
    ),
}
"""Platform → the flags of every step."""

LARGE = 256 * 2**20
"""Bytes up to which sums of gradients are joined."""

CROSSING: Mapping[str, tuple[Flag, ...]] = {
    "cpu": (),
    "tpu": (
        Flag(
            "xla_tpu_dcn_all_reduce_combiner_threshold_bytes",
            LARGE,
            "gradients cross in a few large messages: the slow network has long latencies",
        ),
    ),
    "cuda": (
        Flag(
            "xla_gpu_all_reduce_combine_threshold_bytes",
            LARGE,
            "gradients cross in a few large messages: the slow network has long latencies",
        ),
    ),
}
"""Platform → what is added where an axis is on the slow network."""

START_UP: Mapping[str, tuple[Flag, ...]] = {
    "cpu": (),
    "tpu": (),
    "cuda": (
        Flag(
            "XLA_PYTHON_CLIENT_MEM_FRACTION",
            0.9,
            "JAX takes this part of a GPU's memory, and three quarters if it is not told",
        ),
    ),
}
"""Platform → variables that must be there before JAX starts."""


def flags_for(asked: Iterable[str], platform: str, *, crossing: bool) -> tuple[Flag, ...]:
    """The flags of a step; of several values for one name, the last.

    Args:
        asked: `"preset"` or `"NAME=VALUE"`, as in a config.
        platform: `"cpu"`, `"tpu"`, or `"cuda"`, which JAX also calls `"gpu"`.
        crossing: Whether an axis is on the slow network.

    Example:
        >>> asked = ["preset", "xla_gpu_enable_pipelined_all_gather=false"]
        >>> print(*flags_for(asked, "cuda", crossing=False), sep="\\n")
        xla_gpu_enable_latency_hiding_scheduler=true
        xla_gpu_enable_pipelined_all_gather=false
    """
    platform = known_platform(platform)
    chosen: dict[str, Flag] = {}
    for text in asked:
        preset = PRESETS[platform] + (CROSSING[platform] if crossing else ())
        chosen |= {flag.name: flag for flag in (preset if text == PRESET else [_read(text)])}
    return tuple(chosen.values())


def known_platform(platform: str) -> str:
    """The platform by the name that the tables have: JAX's devices say `gpu` for what its plugin calls `cuda`."""
    return "cuda" if platform == "gpu" else platform


def compiler_options(flags: Iterable[Flag]) -> dict[str, Value]:
    """The flags as `jax.stages.Lowered.compile` takes them."""
    return {flag.name: flag.value for flag in flags}


def flag_problems(asked: Iterable[str]) -> list[Problem]:
    """What is wrong with a config's list, as far as it can be seen without a compiler.

    Example:
        >>> print(*flag_problems(["preset", "xla_a=1", "prset"]))
        xla: is 'prset'
            fix: did you mean "preset"?
    """
    wrong = [text for text in asked if text != PRESET and not (text.startswith("xla_") and "=" in text)]
    return [Problem("xla", f"is {text!r}", fix=did_you_mean(text, (PRESET, "xla_NAME=VALUE"))) for text in wrong]


def describe(title: str, flags: Iterable[Flag]) -> str:
    """The title, and two lines for each flag: its value and its reason."""
    return "".join([f"{title}\n", *(f"  {flag}\n      {flag.reason}\n" for flag in flags)])


def exports(platform: str) -> str:
    """Lines of shell, each with its end, that set what JAX must find when it starts; nothing where there is nothing.

    Args:
        platform: As for `flags_for`.

    Example:
        >>> print(exports("cuda"), end="")
        # JAX takes this part of a GPU's memory, and three quarters if it is not told
        export XLA_PYTHON_CLIENT_MEM_FRACTION=0.9
    """
    flags = START_UP[known_platform(platform)]
    return "".join(f"# {flag.reason}\nexport {flag}\n" for flag in flags)


def _read(text: str) -> Flag:
    name, _, written = text.partition("=")
    value: Value = written
    if written in ("true", "false"):
        value = written == "true"
    else:
        for kind in (int, float):
            try:
                value = kind(written)
                break
            except ValueError:
                pass
    return Flag(name, value, "the config says so")
