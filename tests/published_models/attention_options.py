"""Softmax attention with sinks, chunks, values of their own width, or factors by position."""

from tests.published_models.common import BIASED, LLAMA, MIXED, PLAIN, SCALED, THETA

GPT_OSS = {**LLAMA, "head_dim": 16, "sliding_window": 5, "num_local_experts": 4}
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **THETA},
    **{"beta_fast": 4.0, "beta_slow": 1.0, "truncate": False},
}
TEMPERED = {
    **{**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 5},
    "llama_4_scaling_beta": 0.7,
}
LLAMA4 = {
    **{**LLAMA, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 40},
    **{"attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.7},
}
LLAMA4_IMAGES = {
    **{
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
    **{"image_size": 16, "patch_size": 4, "pixel_shuffle_ratio": 0.5},
    **{"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
}
MINISTRAL3 = {**LLAMA, "head_dim": 16, "rope_parameters": TEMPERED}
PIXTRAL = {
    **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "head_dim": 8},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
WITH_IMAGES = {
    "Llama4": {"text_config": LLAMA4, "vision_config": LLAMA4_IMAGES},
    "Mistral3": {
        "text_config": {"model_type": "ministral3", **MINISTRAL3},
        "vision_config": PIXTRAL,
    },
}
"""Class of a model of images and text → its fields."""
GRANITE_FACTORS = {
    **{"attention_multiplier": 0.3, "embedding_multiplier": 3.0},
    **{"residual_multiplier": 0.5, "logits_scaling": 1.7},
}
FLINT = {
    **{**LLAMA, "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 5},
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "shared_expert_intermediate_size": 40,
}
MIMO = {
    **{**LLAMA, "num_hidden_layers": 7, "head_dim": 18, "v_head_dim": 6, "sliding_window": 5},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
BY_LAYER = {
    "sliding_attention": {**PLAIN, "partial_rotary_factor": 0.5},
    "full_attention": {**YARN, "partial_rotary_factor": 0.25},
}
PERSIMMON = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"intermediate_size": 48, "max_position_embeddings": 128},
}
MODELS = {
    "gpt-oss": ("GptOss", {**GPT_OSS, "num_experts_per_tok": 2, "rope_parameters": YARN}),
    "gpt-oss-plain": (
        "GptOss",
        {
            **{**MIXED, "vocab_size": 67, "num_local_experts": 4, "num_experts_per_tok": 1},
            **{"attention_bias": False, "tie_word_embeddings": True, "rope_parameters": PLAIN},
        },
    ),
    "gpt-oss-default-positions": ("GptOss", {**GPT_OSS, "num_experts_per_tok": 3, "head_dim": 8}),
    "ministral3": ("Ministral3", MINISTRAL3),
    "ministral3-windows": (
        "Ministral3",
        {
            **{**LLAMA, "head_dim": 8, "sliding_window": 7, "tie_word_embeddings": True},
            "rope_parameters": {**TEMPERED, "llama_4_scaling_beta": 0.0},
        },
    ),
    "ministral3-default-positions": ("Ministral3", {**LLAMA, "head_dim": 8}),
    "llama4": ("Llama4", LLAMA4),
    "llama4-dense-layers": (
        "Llama4",
        {
            **{**LLAMA4, "num_hidden_layers": 7, "moe_layers": [2, 3, 5], "vocab_size": 67},
            **{"use_qk_norm": False, "attention_bias": True, "num_experts_per_tok": 2},
            **{"rope_parameters": SCALED, "tie_word_embeddings": True},
        },
    ),
    "llama4-other-layers": (
        "Llama4",
        {
            **{**LLAMA4, "no_rope_layers": [0, 1, 1, 0, 1], "num_hidden_layers": 5},
            **{"layer_types": ["full_attention", "chunked_attention", *["full_attention"] * 3]},
            **{"interleave_moe_layer_step": 2, "attn_temperature_tuning": False},
        },
    ),
    "granite-swa": (
        "GraniteSWA",
        {
            **{**MIXED, **GRANITE_FACTORS, **BIASED, "rope_parameters": PLAIN},
            "layer_rope_theta": [300.0, 0, 5000.0, 300.0, 0, 300.0],
        },
    ),
    "granite-swa-default": (
        "GraniteSWA",
        {
            **{**LLAMA, "sliding_window": 5, "tie_word_embeddings": False, "vocab_size": 67},
            "attention_multiplier": 0.3,  # by default 1, where float32 loses 1e-4 of these logits
        },
    ),
    "flint": ("Flint", FLINT),
    "flint-sparse": (
        "Flint",
        {
            **{**FLINT, **MIXED, "mlp_only_layers": [], "num_experts_per_tok": 1},
            **{"attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False},
        },
    ),
    "flint-dense-layers": (
        "Flint",
        {**FLINT, "num_hidden_layers": 8, "mlp_only_layers": [3], "decoder_sparse_step": 2},
    ),
    "mimo-v2-flash": ("MiMoV2Flash", MIMO),
    "mimo-v2-flash-positions": (
        "MiMoV2Flash",
        {
            **{**MIMO, **MIXED, "attention_bias": True, "attention_value_scale": None},
            **{"norm_topk_prob": False, "routed_scaling_factor": 2.5, "n_group": 4},
            **{"topk_group": 2, "mlp_layer_types": ["sparse"] * 6, "head_dim": 16},
            **{"num_key_value_heads": 1, "rope_parameters": BY_LAYER},
        },
    ),
    "jais2": ("Jais2", LLAMA),
    "jais2-unbiased": (
        "Jais2",
        {**LLAMA, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    ),
    "apertus": ("Apertus", {**LLAMA, "rope_parameters": SCALED}),
    "apertus-biased": (
        "Apertus",
        {
            **{**LLAMA, "attention_bias": True, "tie_word_embeddings": True},
            **{"vocab_size": 67, "rope_parameters": PLAIN},
        },
    ),
    "nanochat": ("NanoChat", LLAMA),
    "nanochat-biased": (
        "NanoChat",
        {
            **{**LLAMA, "attention_bias": True, "final_logit_softcapping": 1.0},
            **{"tie_word_embeddings": True, "vocab_size": 67},
        },
    ),
    "persimmon": ("Persimmon", PERSIMMON),
    "persimmon-plain": (
        "Persimmon",
        {
            **{**PERSIMMON, "qk_layernorm": False, "tie_word_embeddings": True},
            **{"vocab_size": 67, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
        },
    ),
}
# Without modules of multi-token prediction, vision, and the biases of routers, which are variables:
# huggingface.co/openai/{gpt-oss-20b,gpt-oss-120b}, huggingface.co/meta-llama/Llama-4-Scout-17B-16E,
# huggingface.co/meta-llama/Llama-4-Maverick-17B-128E, huggingface.co/XiaomiMiMo/MiMo-V2-Flash,
# huggingface.co/adept/persimmon-8b-base, huggingface.co/swiss-ai/Apertus-{8B,70B}-2509 without the
# constants of activations.
PUBLISHED = {
    "apertus-70b": 70_599_864_480,
    "apertus-8b": 8_053_338_176,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "llama4-maverick": 400_711_848_960,
    "llama4-scout": 107_769_861_120,
    "mimo-v2-flash": 308_778_768_832,
    "persimmon-8b": 9_397_175_296,
}
REFUSED = {
    "apertus": {"hidden_act": "silu"},
    "flint": {"mlp_only_layers": "none"},
    "gpt_oss": {"swiglu_limit": 5.0},
    "granite_swa": {"layer_rope_theta": [1e4]},
    "jais2": {"hidden_act": "silu"},
    "llama4_text": {"moe_layers": []},
    "mimo_v2_flash": {"scoring_func": "softmax"},
    "ministral3": {"partial_rotary_factor": 0.5},
    "nanochat": {"hidden_act": "gelu"},
    "persimmon": {"num_key_value_heads": 2},
}
