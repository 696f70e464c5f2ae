"""Models written by `transformers` are the same models here, and those that are written here are the same there.

A new family is one line of `MODELS` in tests/published_models.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from spmd.data.tokenizer import load_tokenizer
from spmd.generate.generator import Generator
from spmd.generate.sampling import Sampling
from spmd.hf import family as families
from spmd.hf.folder import open_folder
from spmd.hf.layout import AS_IS
from spmd.hf.load import load_model
from spmd.hf.safetensors import write_safetensors
from spmd.hf.save import save_params
from spmd.model_interface.model import as_outputs
from spmd.plan.nnx_model import from_nnx
from spmd.plan.plan import make_plan
from spmd.sharding.mesh import make_mesh
from spmd.training.state import ModelState
from tests.numerics.test_sampling import LOGITS, expected
from tests.published_models import cases
from tests.unit.test_tokenizer import begin_with, bpe

MODELS = cases("MODELS")
WITH_IMAGES = cases("WITH_IMAGES")
CONFIGS = {
    **{"Gemma3": "Gemma3Text", "Llama4": "Llama4Text"},
    **{"Qwen3_5": "Qwen3_5Text", "Qwen3_5Moe": "Qwen3_5MoeText"},
}
"""Class of a model → that of its config, where it is named otherwise."""
ENDINGS = {"GPT2": "LMHeadModel", "ViT": "ForImageClassification"}
MESHES = {"one": {}, "fsdp2-tensor2": {"fsdp": 2, "tensor": 2}}
IN_CI = ("llama", "gpt2")
"""Models that every change is compared with; the others are soak."""


def marked(names):
    """The names, as soak where they are not among those in CI."""
    return [name if name in IN_CI else pytest.param(name, marks=pytest.mark.soak) for name in names]


FOLDED = ("falcon-h1", "falcon-h1-gate-first")
"""Models of which several factors of config.json are written as their product."""
TEXT = [name for name in MODELS if name != "vit"]
TOKENS = np.random.default_rng(0).integers(0, 64, (4, 12), dtype=np.int32)
IMAGES = np.random.default_rng(1).standard_normal((4, 12, 12, 3), np.float32)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def transformers():
    """The library, without its progress bars."""
    return quiet_transformers()


def quiet_transformers():
    """The library, without its progress bars."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    mend_deepseek_v2(transformers)
    return transformers


def mend_deepseek_v2(transformers):
    """Give the experts of DeepSeek-V2 their number, which they lack in transformers 5.0."""
    if transformers.__version__.startswith("5.0."):
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

        DeepseekV2Moe.num_experts = property(lambda self: self.config.n_routed_experts)


@pytest.fixture(scope="module")
def written(transformers, tmp_path_factory):
    """A function: name of a model → a folder as transformers writes it, in one file or several, and its logits."""
    import torch

    made = {}

    def write(name):
        if name not in made:
            kind, fields = MODELS[name]
            torch.manual_seed(0)
            model = getattr(transformers, kind + ENDINGS.get(kind, "ForCausalLM"))(
                getattr(transformers, f"{CONFIGS.get(kind, kind)}Config")(**fields)
            ).eval()
            with torch.no_grad():
                # norms and biases are 1 and 0, where nothing would be seen
                for parameter in model.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
                for path, buffer in model.named_buffers():
                    if path.endswith(("e_score_correction_bias", "expert_bias")):
                        buffer.add_(0.3 * torch.rand_like(buffer))
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder / "whole")
            model.save_pretrained(folder / "sharded", max_shard_size="20KB")
            made[name] = folder, logits_there(model)
        return made[name]

    return write


def logits_there(model):
    """What a model of transformers says."""
    import torch

    asked = (
        TOKENS.astype(np.int64)
        if model.config.model_type != "vit"
        else IMAGES.transpose(0, 3, 1, 2)
    )
    with torch.no_grad():
        return model(torch.tensor(asked)).logits.numpy()


def read(folder, **sizes):
    """The family, the shape, the plan and the arrays of a folder on a mesh."""
    count = int(np.prod([*sizes.values(), 1]))
    mesh = make_mesh(devices=jax.devices()[:count], **sizes)
    with open_folder(folder) as found:
        family, config = found.family, found.config
        plan = make_plan(mesh, family.rules(config), from_nnx(config.build), optax.sgd(0.1))
        arrays = load_model(found, plan.abstract_params, plan.abstract_variables)
    return family, config, plan, ModelState(*arrays)


def logits_here(plan, state):
    """What the same model says here."""
    asked = jnp.asarray(IMAGES if "class_token" in state.params else TOKENS)

    @jax.jit
    def run(params, variables, asked):
        outputs, _ = plan.model.forward(params, variables, None, asked, train=False)
        return as_outputs(outputs).logits

    return np.asarray(run(state.params, state.variables, asked))


def difference(ours, theirs):
    """The largest, of logits of this size."""
    assert np.abs(theirs).max() > 0.5
    return np.abs(ours - theirs).max()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", marked(MODELS))
def test_logits_are_those_of_transformers(name, mesh, written):
    """In float32, on one device from one file, and on four from several."""
    folder, theirs = written(name)
    folder = folder / ("sharded" if MESHES[mesh] else "whole")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == bool(MESHES[mesh])
    _, _, plan, state = read(folder, **MESHES[mesh])
    assert difference(logits_here(plan, state), theirs) < TOLERANCE


@pytest.mark.parametrize("name", marked(TEXT))
def test_greedy_text_is_that_of_transformers(name, written, transformers):
    """64 tokens after each of four prompts, with a cache here, on a mesh.

    There without one: some caches of transformers change the text, such as a window of one token, or step sizes
    of Mamba 2, which are limited in prompts only.
    """
    import torch

    folder, _ = written(name)
    there = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole").eval()
    there.generation_config.eos_token_id = None
    asked = torch.tensor(TOKENS.astype(np.int64))
    options = {"do_sample": False, "max_new_tokens": 64, "use_cache": False}
    theirs = there.generate(asked, attention_mask=torch.ones_like(asked), **options)
    _, _, plan, state = read(folder / "whole", fsdp=2, tensor=2)
    generator = Generator(plan, window=96, sampling=Sampling(temperature=0.0))
    assert not generator.whole_window
    ours = generator.write(state.params, state.variables, list(TOKENS), tokens=64)
    np.testing.assert_array_equal(np.stack(ours), theirs[:, TOKENS.shape[1] :].numpy())
    assert len(np.unique(ours)) > 4  # not one token over and over


@pytest.mark.parametrize("name", marked(MODELS))
def test_there_and_back(name, written, transformers, tmp_path):
    """What is exported from four devices has the same bits, loads in transformers, and says the same."""
    folder, theirs = written(name)
    family, config, _, state = read(folder / "sharded", fsdp=2, tensor=2)
    values = json.loads((folder / "sharded" / "config.json").read_text())
    save_params(
        *(tmp_path / "out", state.params, family, config),
        shard_size=20_000,
        values=values,
        variables=state.variables,
    )
    before, after = tensors(folder / "sharded"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[tensor], after[tensor]) for tensor in before)
    kind = getattr(transformers, values["architectures"][0])
    again, about = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(about.values())
    assert again.config.id2label == kind.from_pretrained(folder / "whole").config.id2label
    allowed = 1e-6
    if name in FOLDED:
        allowed = 1e-5
    allowed *= np.abs(theirs).max()
    np.testing.assert_allclose(logits_there(again.eval()), theirs, rtol=0, atol=allowed)


def tensors(folder):
    """Every tensor of a folder."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    # In layers of OLMo Hybrid with attention, transformers 5.24 writes the name of other layers:
    # its reverse of a renaming acts on all. Published files have the name that is ours.
    for tensor in list(found):
        after = tensor.replace("feedforward_layer_norm", "post_feedforward_layernorm")
        if after != tensor and after in found:
            ours = tensor.replace("feedforward_layer_norm", "post_attention_layernorm")
            found[ours] = found.pop(tensor)
    return found


FORMS = [
    *((kind, "as written") for kind in WITH_IMAGES),
    *(("Llama4", "experts in one tensor"), ("Qwen3_5Moe", "experts in one tensor")),
    *(("Gemma3", "tower in a module"), ("Mistral3", "head of its own")),
    ("Mistral3", "text of Mistral"),
]


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_the_text_part_of_a_model_of_images_is_read(kind, form, transformers, tmp_path):
    """With all tensors of images ignored by name, and exported as a model of text with the same logits."""
    import torch

    torch.manual_seed(0)
    fields = dict(WITH_IMAGES[kind])
    if form == "text of Mistral":
        fields["text_config"] = {"model_type": "mistral", **MODELS["mistral"][1]}
    config = getattr(transformers, f"{kind}Config")(**fields)
    if form == "head of its own":
        config.tie_word_embeddings = False
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "model")
    if form == "experts in one tensor":
        fuse_experts(tmp_path / "model")
    elif form == "tower in a module":
        nest_tower(tmp_path / "model")
    _, shape, plan, state = read(tmp_path / "model", fsdp=2, tensor=2)
    if kind == "Llama4":
        model = model.language_model  # its forward without images raises AttributeError in 5.24
    theirs = logits_there(model)
    assert np.abs(theirs).max() > 0.1
    np.testing.assert_allclose(logits_here(plan, state), theirs, rtol=0, atol=TOLERANCE)
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    family = families.family_for(shape, values["architectures"])
    save_params(tmp_path / "out", state.params, family, shape, values=values)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again).__name__ == family.architectures[0]
    assert family.architectures[0] not in values["architectures"]
    np.testing.assert_allclose(
        logits_there(again), theirs, rtol=0, atol=1e-6 * np.abs(theirs).max()
    )


def fuse_experts(folder):
    """Write the experts of each layer as one tensor, as published files have them."""
    found = tensors(folder)
    (path,) = folder.glob("*.safetensors")
    path.unlink()
    for layer in range(4):
        block = f"model.language_model.layers.{layer}.mlp.experts."
        parts = {}
        for name in ("gate_proj", "up_proj", "down_proj"):
            keys = [f"{block}{expert}.{name}.weight" for expert in range(4)]
            keys = [key for key in keys if key in found]
            parts[name] = [found.pop(key) for key in keys]
        if parts["gate_proj"]:
            into = [np.stack(parts[name]) for name in ("gate_proj", "up_proj")]
            found[f"{block}gate_up_proj"] = np.concatenate(into, axis=1)
            found[f"{block}down_proj"] = np.stack(parts["down_proj"])
    write_tensors(path, found)


def nest_tower(folder):
    """Rename the tensors of images as in files before transformers 5."""
    (path,) = folder.glob("*.safetensors")
    found = {}
    for name, value in tensors(folder).items():
        found[name.replace("vision_tower.", "vision_tower.vision_model.")] = value
    path.unlink()
    write_tensors(path, found)


def write_tensors(path, found):
    """Write tensors as one file."""
    kinds = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in found.items()}
    write_safetensors(path, kinds, iter(found.values()), {"format": "pt"})


def test_a_16_bit_checkpoint_is_read_as_transformers_reads_it(written, transformers, tmp_path):
    """bfloat16 in the files is float32 here, with the same values."""
    import torch

    folder, _ = written("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "whole", dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "narrow")
    _, _, plan, state = read(tmp_path / "narrow", fsdp=2, tensor=2)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
    assert difference(logits_here(plan, state), logits_there(model.float().eval())) < TOLERANCE


def test_a_prefix_may_be_left_out(written, tmp_path):
    """The published GPT-2 names its tensors without `transformer.`, and has masks among them."""
    folder, theirs = written("gpt2")
    there = {
        name.removeprefix("transformer."): value
        for name, value in tensors(folder / "whole").items()
    }
    there["h.0.attn.bias"] = np.tril(np.ones((1, 1, 128, 128), np.float32))
    kinds = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in there.items()}
    write_safetensors(tmp_path / "model.safetensors", kinds, iter(there.values()), {})
    (tmp_path / "config.json").write_text((folder / "whole" / "config.json").read_text())
    _, _, plan, state = read(tmp_path)
    assert difference(logits_here(plan, state), theirs) < TOLERANCE


def in_other_lines(monkeypatch, change):
    """Name maps whose lines are changed."""
    tables = families.Family.tables

    def changed(self, *given):
        names, ignored = tables(self, *given)
        return tuple(map(change, names)), ignored

    monkeypatch.setattr(families.Family, "tables", changed)


BUGS = {
    "a kernel that is not turned": lambda name: (
        dataclasses.replace(name, layout=AS_IS) if name.path.endswith("q_proj/kernel") else name
    ),
    "layers in reverse": lambda name: dataclasses.replace(name, first=3, step=-1),
    "norms exchanged": lambda name: (
        dataclasses.replace(
            name, tensor=name.tensor.replace("input_layernorm", "post_attention_layernorm")
        )
        if name.path.endswith("attention_norm/scale")
        else dataclasses.replace(
            name, tensor=name.tensor.replace("post_attention_layernorm", "input_layernorm")
        )
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_line_is_seen(bug, written, monkeypatch):
    """A control: the tolerance is too small for any of these."""
    folder, theirs = written("llama")
    in_other_lines(monkeypatch, BUGS[bug])
    _, _, plan, state = read(folder / "whole")
    assert difference(logits_here(plan, state), theirs) > 30 * TOLERANCE


@pytest.mark.soak
def test_a_mirrored_patch_is_seen(written):
    """A control: rows of pixels are not columns."""
    folder, theirs = written("vit")
    _, _, plan, state = read(folder / "whole")
    kernel = state.params["patch_proj"]["kernel"]
    state.params["patch_proj"]["kernel"] = kernel.swapaxes(0, 1)
    assert difference(logits_here(plan, state), theirs) > 30 * TOLERANCE


@pytest.mark.parametrize("text", ["the dog", "", "<|im_start|>user the dog<|im_end|>", "  fox\n"])
@pytest.mark.parametrize("end", [None, ("</s>", 0)], ids=["", "end"])
def test_a_prompt_is_encoded_as_transformers_does(end, text, tmp_path, transformers):
    """With the post-processor's tokens in front, and special tokens where they are spelled; the end is omitted."""
    path = bpe(tmp_path / "tokenizer.json", special=("</s>", "<s>", "<|im_start|>", "<|im_end|>"))
    begin_with(path, ("<s>", 1), end=end)
    tokenizer = load_tokenizer(str(path))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))(text)["input_ids"]
    assert tokenizer.encode_prompt(text).tolist() == (theirs[:-1] if end else theirs)
    assert tokenizer.starts == (1,)
    # A chat template writes the first token itself, and no second one is put before it.
    assert tokenizer.encode_prompt("<s>" + text).tolist() == tokenizer.encode_prompt(text).tolist()
    # In a document, the same letters are text.
    assert not {0, 1, 2, 3} & set(tokenizer.encode("<s>" + text).tolist())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "options",
    [{"top_k": 3}, {"top_p": 0.7}, {"temperature": 1.5, "top_k": 6, "top_p": 0.8}],
    ids=str,
)
def test_cuts_of_a_distribution_are_those_of_transformers(options, transformers):
    """What NumPy says above is what its warpers leave of the same scores, in the order in which it applies them."""
    import torch
    from transformers.generation import logits_process as warpers

    scores = torch.tensor(LOGITS)[None]
    scores = warpers.TemperatureLogitsWarper(options.get("temperature", 1.0))(None, scores)
    if "top_k" in options:
        scores = warpers.TopKLogitsWarper(options["top_k"])(None, scores)
    if "top_p" in options:
        scores = warpers.TopPLogitsWarper(options["top_p"])(None, scores)
    np.testing.assert_allclose(torch.softmax(scores, -1)[0].numpy(), expected(**options), atol=1e-6)
