"""Decoders with fused kernels, parallel residual branches or partial rotary positions."""

from tests.published_models.common import BIASED, LLAMA, PLAIN, THETA


def without(fields, *names):
    """The fields except for those of some names."""
    return {name: value for name, value in fields.items() if name not in names}


LONGROPE = {
    **{"rope_type": "longrope", "factor": 4.0, **THETA},
    **{"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 9.0]},
}
SHORT_TEXTS = {
    **{"max_position_embeddings": 512, "original_max_position_embeddings": 128},
    "rope_parameters": LONGROPE,
}
LONG_TEXTS = {
    **{"max_position_embeddings": 128, "original_max_position_embeddings": 8},
    "rope_parameters": {
        **LONGROPE,
        "partial_rotary_factor": 0.5,
        **{"short_factor": [1.0, 1.2], "long_factor": [1.5, 4.0]},
    },
}
PHI3 = {**LLAMA, "pad_token_id": 0}
EQUAL_HEADS = {**LLAMA, "num_key_value_heads": 4}
NEOX = {**EQUAL_HEADS, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}
PLAIN_HEADS = without(LLAMA, "num_key_value_heads", "intermediate_size")
FALCON = {**PLAIN_HEADS, "num_kv_heads": 2, "pad_token_id": 0}
NEW_FALCON = {**FALCON, "new_decoder_architecture": True}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
GPTJ = {**GPT2, "rotary_dim": 4, "bos_token_id": 0, "eos_token_id": 0}
GPT_NEO = {
    **{"vocab_size": 64, "hidden_size": 32, "num_layers": 4, "num_heads": 4},
    **{"intermediate_size": 48, "window_size": 4, "max_position_embeddings": 128},
}
OPT = {**PLAIN_HEADS, "ffn_dim": 48, "pad_token_id": 0}
MUP = {
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    **{"attention_multiplier": 0.3, "logits_scaling": 0.6},
}
MODELS = {
    "phi3": ("Phi3", {**PHI3, "sliding_window": 4}),
    "phi3-odd-vocabulary": ("Phi3", {**PHI3, "vocab_size": 67, "num_key_value_heads": 4}),
    "phi3-short-texts": ("Phi3", {**PHI3, **SHORT_TEXTS}),
    "phi3-long-texts": ("Phi3", {**PHI3, **LONG_TEXTS, "tie_word_embeddings": True}),
    "gpt-neox": ("GPTNeoX", NEOX),
    "gpt-neox-sequential": (
        "GPTNeoX",
        {**NEOX, "use_parallel_residual": False, "attention_bias": False, "vocab_size": 67},
    ),
    "gpt-neox-tied": (
        "GPTNeoX",
        {**EQUAL_HEADS, "tie_word_embeddings": True, "hidden_act": "relu"},
    ),
    "falcon": ("Falcon", {**FALCON, "ffn_hidden_size": 48, "vocab_size": 67}),
    "falcon-all-heads": ("Falcon", {**FALCON, "num_kv_heads": 4, "multi_query": False}),
    "falcon-sequential": ("Falcon", {**FALCON, "parallel_attn": False, "bias": True}),
    "falcon-grouped": ("Falcon", {**NEW_FALCON, "tie_word_embeddings": False}),
    "falcon-grouped-one-norm": (
        "Falcon",
        {**NEW_FALCON, "num_ln_in_parallel_attn": 1, "bias": True, "activation": "relu"},
    ),
    "stablelm": ("StableLm", {**LLAMA, "num_hidden_layers": 3, "use_qkv_bias": True}),
    "stablelm-parallel": (
        "StableLm",
        {
            **{**LLAMA, "use_parallel_residual": True, "qk_layernorm": True, "vocab_size": 67},
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
        },
    ),
    "cohere-normed": ("Cohere", {**LLAMA, "logit_scale": 0.7, "use_qk_norm": True}),
    "phi": ("Phi", {**LLAMA, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    "phi-normed": (
        "Phi",
        {**LLAMA, "qk_layernorm": True, "vocab_size": 67, "hidden_act": "gelu"},
    ),
    "phi-tied": ("Phi", {**LLAMA, "tie_word_embeddings": True}),
    "gptj": ("GPTJ", {**GPTJ, "n_inner": 48}),
    "gptj-tied": ("GPTJ", {**GPTJ, "rotary_dim": 8, "tie_word_embeddings": True}),
    "codegen": ("CodeGen", {**GPTJ, "activation_function": "silu"}),
    "gpt2-untied": ("GPT2", {**GPT2, "tie_word_embeddings": False, "vocab_size": 67}),
    "gpt2-relu": ("GPT2", {**GPT2, "activation_function": "relu", "n_inner": 48}),
    "gpt-neo": ("GPTNeo", {**GPT_NEO, "attention_types": [[["global", "local"], 2]]}),
    "gpt-neo-local": (
        "GPTNeo",
        {
            **{**GPT_NEO, "attention_types": [[["local"], 3], [["global"], 1]]},
            **{"intermediate_size": None, "tie_word_embeddings": False, "vocab_size": 67},
        },
    ),
    "gpt-bigcode": ("GPTBigCode", GPT2),
    "gpt-bigcode-all-heads": ("GPTBigCode", {**GPT2, "multi_query": False, "vocab_size": 67}),
    "opt": ("OPT", OPT),
    "opt-plain": (
        "OPT",
        {
            **{**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False},
            **{"activation_function": "gelu", "vocab_size": 67, "tie_word_embeddings": False},
        },
    ),
    "biogpt": (
        "BioGpt",
        {**EQUAL_HEADS, "num_hidden_layers": 6, "pad_token_id": 0, "layer_norm_eps": 0.1},
    ),
    "biogpt-unscaled": ("BioGpt", {**EQUAL_HEADS, "scale_embedding": False, "pad_token_id": 0}),
    "hyperclovax": ("HyperCLOVAX", {**LLAMA, **MUP}),
    "hyperclovax-biased": (
        "HyperCLOVAX",
        {**LLAMA, **BIASED, "use_post_norm": False, "head_dim": 16, "tie_word_embeddings": True},
    ),
}
# Elements in the tensors of the published checkpoints; a head that is the embedding is counted
# once: huggingface.co/microsoft/{Phi-3-mini-4k-instruct,Phi-3-medium-4k-instruct,phi-4},
# microsoft/{phi-1_5,phi-2}, EleutherAI/{pythia-…,gpt-neox-20b,gpt-j-6b}, Salesforce/codegen-350M-mono,
# tiiuae/{falcon-7b,falcon-11B,falcon-40b},
# stabilityai/{stablelm-3b-4e1t,stablelm-2-1_6b,stablelm-2-12b}, CohereLabs/c4ai-command-r-plus.
PUBLISHED = {
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
    "starcoder-15.5b": 15_517_456_384,
    "starcoderbase-1b": 1_137_207_296,
    "biogpt": 346_763_264,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "codegen-350m": 356_712_448,
    "gptj-6b": 6_050_882_784,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "command-r-plus": 103_810_674_688,
    "stablelm-3b": 2_795_443_200,
    "stablelm-2-1.6b": 1_644_515_328,
    "stablelm-2-12b": 12_143_185_920,
    "falcon-7b": 6_921_720_704,
    "falcon-11b": 11_102_822_400,
    "falcon-40b": 41_303_293_952,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "phi3-mini-4k": 3_821_079_552,
    "phi3-medium-4k": 13_960_238_080,
    "phi4": 14_659_507_200,
}
REFUSED = {
    "gpt_bigcode": {"multi_query": "yes"},
    "gpt_neo": {"attention_types": [[["global"], 3]]},
    "biogpt": {"num_key_value_heads": 2},
    "opt": {"do_layer_norm_before": False},
    "codegen": {"rotary_dim": 9},
    "gptj": {"rotary_dim": 3},
    "hyperclovax": {"logits_scaling": 0},
    "phi": {"hidden_act": "sine"},
    "cohere2": {"use_qk_norm": True},
    "stablelm": {"num_attention_heads": 3},
    "falcon": {"alibi": True},
    "gpt_neox": {"rotary_pct": 0},
    "phi3": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
}
