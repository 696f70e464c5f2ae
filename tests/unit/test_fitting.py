"""What is said to make a step fit is the first thing, alone or with all before it, that does."""

import dataclasses
from types import SimpleNamespace

import pytest

from spmd.errors import ConfigError, Problem
from spmd.run import suggest as fitting


@dataclasses.dataclass(frozen=True)
class Config:
    zero: int = 3
    remat: str = "full"
    offload: tuple[str, ...] = ()
    accumulate: int = 1


def found(fits, monkeypatch, **fields):
    """What is found where a step takes 1 byte if `fits` says so of its config, and 3 otherwise; there are 2."""

    class Recipe:
        def __init__(self, config, mesh):
            self.config, self.mesh = config, mesh

        def check_batch(self):
            if self.config.accumulate > 4:
                raise ConfigError("no", [Problem("accumulate", "does not divide")])

        def memory(self, platform):
            return SimpleNamespace(total=1 if fits(self.config) else 3)

    monkeypatch.setattr(fitting, "TrainSetup", Recipe)
    topology = SimpleNamespace(platform="tpu", memory=2)
    return fitting.suggest_memory_settings(Recipe(Config(**fields), None), topology)


BOTH = ("optimizer_state", "params")


@pytest.mark.parametrize(
    ("fits", "flags"),
    [
        (lambda c: c.offload == BOTH and c.accumulate == 2, ["--offload optimizer_state params --accumulate 2"]),
        (lambda c: c.offload == BOTH, ["--offload optimizer_state params"]),
        (lambda c: c.accumulate == 4, ["--accumulate 4", "--offload optimizer_state params --accumulate 4"]),
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
