"""What is said to make a step fit is the first thing, alone or with all before it, that does."""

import dataclasses
from types import SimpleNamespace

import pytest

from spmd.errors import ConfigError, Problem
from spmd.run import preflight as fitting


@dataclasses.dataclass(frozen=True)
class Config:
    zero: int = 3
    remat: str = "full"
    offload: tuple[str, ...] = ()
    accumulate: int = 1


def found(fits, monkeypatch, **fields):
    """What is found where a step takes 1 byte if `fits` says so of its config, and 3 otherwise; there are 2."""

    def check_microbatches(setup):
        if setup.config.accumulate > 4:
            raise ConfigError("no", [Problem("accumulate", "does not divide")])

    def make_setup(config, mesh):
        return SimpleNamespace(config=config, mesh=mesh)

    monkeypatch.setattr(fitting, "make_setup", make_setup)
    monkeypatch.setattr(fitting, "check_microbatches", check_microbatches)

    def total(setup, platform):
        return SimpleNamespace(total=1 if fits(setup.config) else 3)

    monkeypatch.setattr(fitting, "estimate_step", total)
    topology = SimpleNamespace(platform="tpu", memory=2)
    return fitting.suggest_memory_settings(make_setup(Config(**fields), None), topology)


BOTH = ("optimizer_state", "params")


@pytest.mark.parametrize(
    ("fits", "flags"),
    [
        (
            lambda c: c.offload == BOTH and c.accumulate == 2,
            ["--offload optimizer_state params --accumulate 2"],
        ),
        (lambda c: c.offload == BOTH, ["--offload optimizer_state params"]),
        (
            lambda c: c.accumulate == 4,
            ["--accumulate 4", "--offload optimizer_state params --accumulate 4"],
        ),
        (lambda c: c.accumulate == 8, []),
    ],
    ids=["with those before it", "alone", "smaller microbatches", "what is refused"],
)
def test_settings_are_tried_alone_and_with_those_before(fits, flags, monkeypatch):
    """Parameters in host memory go with smaller microbatches, too."""
    assert [flag for flag, _ in found(fits, monkeypatch)] == flags


def test_what_is_set_already_is_not_tried(monkeypatch):
    """A step at ZeRO 1 is sharded first, and then recomputed beside that."""
    settings = found(lambda c: c.zero == 3 and c.remat == "full", monkeypatch, zero=1, remat="none")
    assert [flag for flag, _ in settings] == ["--zero 3 --remat full"]
