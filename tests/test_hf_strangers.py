"""What a stranger's folder says is believed only where it is so: nothing is lost in silence, and nothing is a bomb."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from models import gemma, gpt2, llama
from spmd import flax
from spmd.errors import CheckpointError
from spmd.hf import published as published_module
from spmd.hf.family import family_for
from spmd.hf.load import check_published
from spmd.hf.published import published
from spmd.hf.safetensors import SafetensorsFile, write_safetensors
from spmd.hf.save import save_params

EMBEDDING = "model.embed_tokens.weight"
TIED = {
    "llama": (dataclasses.replace(llama.PRESETS["test"], tied=True), EMBEDDING),
    "gemma": (gemma.PRESETS["test-gemma"], EMBEDDING),
    "gemma2": (gemma.PRESETS["test-gemma2"], EMBEDDING),
    "gpt2": (gpt2.PRESETS["test"], "transformer.wte.weight"),
    "gpt2 without a prefix": (gpt2.PRESETS["test"], "wte.weight"),
}


def initial(config):
    """Parameters of a shape."""
    return flax.from_nnx(config.build).init(jax.random.key(0))


def write(folder, config, change=lambda tensors: tensors, **fields):
    """A folder of a shape, with other tensors and other fields."""
    save_params(folder, initial(config), family_for(config), config)
    path = folder / "model.safetensors"
    with SafetensorsFile(path) as file:
        table = change({name: file.read(name) for name in file.tensors})
    path.unlink()
    kinds = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in table.items()}
    write_safetensors(path, kinds, iter(table.values()), {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **fields}))
    return folder


def problems(folder, config):
    """What keeps a folder from being a model of that shape: where and what."""
    abstract = jax.eval_shape(lambda: initial(config))
    try:
        with published(folder) as found:
            check_published(found, abstract)
    except CheckpointError as error:
        return error.problems
    return ()


def last_bit(head):
    """Another last element."""
    other = head.copy()
    other[-1, -1] += 1
    return other


HEADS = {
    "the same": (lambda head: head, None),
    "another last element": (last_bit, ""),
    "another shape": (lambda head: head[:-1], "[63, 32]"),
    "another dtype": (lambda head: head.astype(np.float16), "it is float16"),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", TIED)
def test_a_head_of_its_own_is_not_lost(name, head, tmp_path, monkeypatch):
    """Where config.json says that the head is the embedding, one that differs from it is refused."""
    monkeypatch.setattr(published_module, "_COMPARED_AT_ONCE", 1000)
    (config, embedding), (change, arithmetic) = TIED[name], HEADS[head]

    def changed(tensors):
        if "without" in name:
            tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        return {**tensors, "lm_head.weight": change(tensors[embedding])}

    found = problems(write(tmp_path / "a", config, changed), config)
    if arithmetic is None:
        assert found == ()
        return
    (problem,) = found
    assert problem.where == "lm_head.weight"
    assert problem.what == f"differs from {embedding}, and this model's head is the embedding"
    assert arithmetic in problem.arithmetic
    assert "tie_word_embeddings=false" in problem.fix
