"""The frozen teacher of a run: its parameters, and batches with them (`--teacher`)."""

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from spmd.data.loader import Batches
from spmd.data.tokenizer import TOKENIZER, Tokenizer, load_tokenizer, token_difference
from spmd.errors import ConfigError, Problem
from spmd.gradients.distillation_loss import TEACHER
from spmd.hf.folder import open_folder
from spmd.hf.load import check_published, load_published
from spmd.observe.spinner import spinner
from spmd.plan.plan import ShardingPlan
from spmd.resilience.digests import digest_arrays
from spmd.run.build import TrainSetup
from spmd.run.config import EXECUTION_FIELDS, config_difference, config_values
from spmd.run.load_config import other_config
from spmd.run.load_params import read_params
from spmd.run.run_dir import RunDir, is_run
from spmd.run.teacher_plan import read_model
from spmd.sharding.batch import whole
from spmd.storage.address import locate
from spmd.storage.download import is_side_file, local_path


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """A frozen model beside the trained one.

    Attributes:
        folder: Run folder or Hugging Face folder.
        plan: Its plan, of `make_teacher_plan`.
    """

    folder: str
    plan: ShardingPlan

    @functools.cached_property
    def arrays(self) -> Any:
        """Its parameters as a batch has them, on the mesh; loaded once."""
        shown: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if jax.process_index() == 0:
            shown = spinner("loading the teacher", plain=True)
        with shown:
            return whole(self._load())

    def _load(self) -> Any:
        location = locate(self.folder)
        abstract = self.plan.abstract_params
        if is_run(location):
            return read_params(location, abstract)
        with open_folder(location) as found:
            return load_published(found, abstract)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of its model and its parameters: a resumed run has the same teacher.

        Parameters are rounded to bfloat16, in which another precision may hold them.
        """
        model, _ = read_model(self.folder)
        # Differences from the defaults stay as they are when a release adds a field.
        settings = config_difference(config_values(type(model)), config_values(model))
        for field in EXECUTION_FIELDS:
            settings.pop(field, None)
        text = json.dumps([type(model).__name__, settings])
        rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), self.arrays.value)
        of_model = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"{of_model} {digest_arrays(rounded)}"

    def check(self, tokenizer: Tokenizer, outputs: int) -> None:
        """Check its files, its tokenizer and its head, before anything is loaded.

        Args:
            outputs: Of the student's head.

        Raises:
            ConfigError: Its tokenizer is another one, or its head is for other tokens.
            CheckpointError: Its tensors are not those of its model.
        """
        model, _ = read_model(self.folder)
        location = locate(self.folder)
        if is_run(location):
            with other_config():
                theirs = RunDir(location).config().data.tokenizer
        else:
            with open_folder(location) as found:
                check_published(found, self.plan.abstract_params, {})
            beside = local_path(self.folder, is_side_file) / TOKENIZER
            if not beside.exists():
                if model.vocab != outputs:
                    what = f"predicts {model.vocab} tokens, the student {outputs}"
                    fix = f"{TOKENIZER} in its folder, if both have one tokenizer"
                    self._refuse(what, "its tokenizer is not known", fix)
                return
            theirs = str(beside)
        difference = token_difference(tokenizer, load_tokenizer(theirs))
        if difference:
            fix = "a teacher and a --data.tokenizer with the same tokens"
            self._refuse("knows other tokens", difference, fix)
        if model.vocab < tokenizer.vocab:
            what = "has fewer outputs than there are tokens"
            detail = f"tokenizer {tokenizer.vocab} > model {model.vocab}"
            self._refuse(what, detail, "a teacher of this tokenizer")

    def _refuse(self, what: str, detail: str, fix: str) -> None:
        """Raise a `ConfigError` with one problem of the teacher."""
        problem = Problem("teacher", what, detail, fix)
        raise ConfigError(f"{self.folder} cannot be the teacher:", [problem])


def open_teacher(setup: TrainSetup) -> Teacher | None:
    """Return the teacher of a setup, without its parameters; None if there is none."""
    if setup.teacher is None:
        return None
    return Teacher(setup.config.teacher, setup.teacher)


class BatchesWithTeacher(Iterator[Any]):
    """Batches with the parameters of a teacher; `close` closes them."""

    def __init__(self, batches: Batches, teacher: Any) -> None:
        self._batches = batches
        self._teacher = teacher

    def __next__(self) -> Any:
        return {**next(self._batches), TEACHER: self._teacher}

    def close(self) -> None:
        """Stop prefetching."""
        self._batches.close()
