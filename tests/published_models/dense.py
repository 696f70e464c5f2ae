"""Decoders with softmax attention and MLPs, Mixtral, and the vision transformer."""

from tests.published_models.common import (
    BIASED,
    EXPERTS,
    LAYERS8,
    LLAMA,
    MIXED,
    PLAIN,
    SCALED,
    THETA,
    WINDOWED,
)

GEMMA2 = {  # with caps that scores and logits of this size do reach
    "head_dim": 16,
    "sliding_window": 4,
    "query_pre_attn_scalar": 9,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 1.0,
}
LOCAL_AND_GLOBAL = {
    "sliding_attention": PLAIN,
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
}
GEMMA3 = {**WINDOWED, "head_dim": 16, "query_pre_attn_scalar": 9}
SIGLIP = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
WITH_IMAGES = {
    "Gemma3": {
        "text_config": {**GEMMA3, "rope_parameters": LOCAL_AND_GLOBAL},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
    },
}
"""Class of a model of images and text → its fields."""
COHERE = {**LLAMA, "logit_scale": 0.7}
VIT = {
    **{
        "image_size": 12,
        "patch_size": 4,
        "num_labels": 6,
        "id2label": {n: f"digit {n}" for n in range(6)},
    },
    **{
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    },
}
MODELS = {
    "llama": ("Llama", {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    "llama-tied": ("Llama", {**LLAMA, "tie_word_embeddings": True, "rms_norm_eps": 0.1}),
    "llama-wide-heads": ("Llama", {**LLAMA, "head_dim": 16}),
    "llama-3.1": ("Llama", {**LLAMA, "rope_parameters": SCALED}),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": 4}),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biased": ("Qwen3", {**LLAMA, "attention_bias": True}),
    "gemma": ("Gemma", {**LLAMA, "head_dim": 16}),
    "gemma2": ("Gemma2", {**LLAMA, **GEMMA2}),
    "gpt2": (
        "GPT2",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128},
    ),
    "vit": ("ViT", VIT),
    "llama-biased": ("Llama", {**LLAMA, **BIASED}),
    "llama-attention-biased": ("Llama", {**LLAMA, "attention_bias": True}),
    "granite": (
        "Granite",
        {
            **{**LLAMA, "attention_multiplier": 0.3, "embedding_multiplier": 3.0},
            **{"residual_multiplier": 0.5, "logits_scaling": 1.7, "tie_word_embeddings": True},
        },
    ),
    "granite-biased": ("Granite", {**LLAMA, **BIASED}),
    "starcoder2": ("Starcoder2", {**LLAMA, "sliding_window": 4}),
    "starcoder2-plain": ("Starcoder2", {**LLAMA, "use_bias": False, "tie_word_embeddings": False}),
    "arcee": ("Arcee", LLAMA),
    "arcee-biased": ("Arcee", {**LLAMA, **BIASED, "head_dim": 16}),
    "seed-oss": ("SeedOss", {**LLAMA, "head_dim": 16}),
    "seed-oss-biased": ("SeedOss", {**LLAMA, **BIASED, "attention_out_bias": True}),
    "ministral": ("Ministral", {**LLAMA, "head_dim": 16, "sliding_window": 4}),
    "ministral-full": (
        "Ministral",
        {**LLAMA, "head_dim": 8, "layer_types": ["full_attention"] * 4},
    ),
    "ministral-mixed": ("Ministral", {**MIXED, "head_dim": 8}),
    "ministral-window-1": ("Ministral", {**LLAMA, "head_dim": 8, "sliding_window": 1}),
    "ministral-window-7": ("Ministral", {**LLAMA, "head_dim": 8, "sliding_window": 7}),
    "ministral-long-window": ("Ministral", {**LLAMA, "head_dim": 8, "sliding_window": 100}),
    "llama-odd-vocabulary": ("Llama", {**LLAMA, "vocab_size": 67}),
    "gemma-untied": ("Gemma", {**LLAMA, "head_dim": 16, "tie_word_embeddings": False}),
    "mixtral-tied-top-1": ("Mixtral", {**EXPERTS, "tie_word_embeddings": True}),
    "olmo": ("Olmo", {**LLAMA, "clip_qkv": 0.5}),
    "olmo-unclipped": ("Olmo", {**LLAMA, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", LLAMA),
    "olmo2-biased": ("Olmo2", {**LLAMA, "attention_bias": True, "head_dim": 16}),
    "smollm3": ("SmolLM3", LAYERS8),
    "smollm3-windows": (
        "SmolLM3",
        {**WINDOWED, "use_sliding_window": True, "no_rope_layers": [1, 0] * 4},
    ),
    "exaone4": ("Exaone4", WINDOWED),
    "exaone4-full": (
        "Exaone4",
        {**LLAMA, "sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "exaone4-no-positions": ("Exaone4", {**LLAMA, "layer_types": ["full_attention"] * 4}),
    "vaultgemma": ("VaultGemma", {**LLAMA, **GEMMA2}),
    "vaultgemma-uncapped": (
        "VaultGemma",
        {**LLAMA, **GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "cwm": ("Cwm", {**WINDOWED, "head_dim": 16}),
    "cwm-plain": ("Cwm", {**MIXED, "mlp_bias": True, "rope_parameters": PLAIN}),
    "gemma3": ("Gemma3", {**GEMMA3, "rope_parameters": LOCAL_AND_GLOBAL}),
    "gemma3-untied": ("Gemma3", {**GEMMA3, "tie_word_embeddings": False}),
    "gemma3-capped": ("Gemma3", {**GEMMA3, "final_logit_softcapping": 1.0}),
    "olmo3": ("Olmo3", {**WINDOWED, "rope_parameters": LOCAL_AND_GLOBAL}),
    "olmo3-biased": (
        "Olmo3",
        {**MIXED, "attention_bias": True, "head_dim": 16, "rope_theta": 5e5},
    ),
    "cohere": ("Cohere", COHERE),
    "cohere-untied": ("Cohere", {**COHERE, "tie_word_embeddings": False, "attention_bias": True}),
    "cohere2": ("Cohere2", {**WINDOWED, "logit_scale": 0.7}),
    "cohere2-biased": ("Cohere2", {**MIXED, "attention_bias": True, "logit_scale": 1.0}),
    "nemotron": ("Nemotron", {**LLAMA, "head_dim": 16}),
    "nemotron-biased": ("Nemotron", {**LLAMA, **BIASED, "partial_rotary_factor": 0.25}),
    "helium": ("Helium", {**LLAMA, "head_dim": 8}),
    "helium-biased": ("Helium", {**LLAMA, **BIASED, "head_dim": 8}),
    "hunyuan": ("HunYuanDenseV1", {**LLAMA, "head_dim": 16}),
    "hunyuan-alpha": (
        "HunYuanDenseV1",
        {
            **{**LLAMA, "attention_bias": True, "head_dim": 8},
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, **THETA},
        },
    ),
}
# Elements in the tensors of the published checkpoints; a head that is the embedding is counted
# once: huggingface.co/arcee-ai/AFM-4.5B, CohereLabs/{c4ai-command-r-v01,c4ai-command-r7b-12-2024},
# LGAI-EXAONE/EXAONE-4.0-{1.2B,32B}, google/{gemma-3-270m,gemma-3-1b-pt,vaultgemma-1b},
# ibm-granite/granite-3.1-2b-base, kyutai/helium-1-preview-2b, tencent/Hunyuan-7B-Instruct,
# internlm/internlm3-8b-instruct, nvidia/Minitron-4B-Base, allenai/{OLMo-1B-hf,OLMo-7B-hf},
# allenai/{OLMo-2-1124-7B,OLMo-2-1124-13B,Olmo-3-1025-7B}, ByteDance-Seed/Seed-OSS-36B-Base,
# HuggingFaceTB/SmolLM3-3B, bigcode/starcoder2-{3b,15b}, facebook/cwm.
PUBLISHED = {
    "afm-4.5b": 4_619_184_640,
    "command-r": 34_980_831_232,
    "command-r7b": 8_028_033_024,
    "cwm-32b": 32_581_097_472,
    "exaone4-1.2b": 1_279_391_488,
    "exaone4-32b": 32_003_216_384,
    "gemma3-1b": 999_885_952,
    "gemma3-270m": 268_098_176,
    "granite-3.1-2b": 2_533_531_648,
    "helium-1-preview-2b": 2_172_643_840,
    "hunyuan-7b": 7_504_568_320,
    "internlm3-8b": 8_804_241_408,
    "minitron-4b": 4_190_509_056,
    "olmo-1b": 1_176_764_416,
    "olmo-7b": 6_888_095_744,
    "olmo2-13b": 13_716_198_400,
    "olmo2-7b": 7_298_617_344,
    "olmo3-7b": 7_298_011_136,
    "seed-oss-36b": 36_151_104_512,
    "smollm3-3b": 3_075_098_624,
    "starcoder2-15b": 15_957_889_024,
    "starcoder2-3b": 3_030_371_328,
    "vaultgemma-1b": 1_038_741_120,
}
REFUSED = {
    "arcee": {"hidden_act": "silu"},
    "cohere": {"rotary_pct": 0.5},
    "cwm": {"sliding_window": None},
    "exaone4": {"layer_types": ["chunked_attention"] * 8},
    "gemma3": {"attn_logit_softcapping": 50.0},
    "granite": {"logits_scaling": 0},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"use_cla": True},
    "internlm3": {"qkv_bias": "yes"},
    "nemotron": {"partial_rotary_factor": 1.5},
    "olmo": {"clip_qkv": -1.0},
    "seed_oss": {"attention_out_bias": 1},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "starcoder2": {"use_bias": None, "norm_type": "rms_norm"},
    "vaultgemma": {"final_logit_softcapping": 0.0},
}
