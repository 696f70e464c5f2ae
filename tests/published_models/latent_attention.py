"""Latent attention, with dense first layers and experts."""

from tests.published_models.common import LLAMA, THETA

LATENT = {
    **{**LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 4, "intermediate_size": 40},
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "moe_intermediate_size": 24},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
V2_GROUPS = {**GROUPS, "topk_method": "group_limited_greedy"}
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **THETA},
    **{"beta_fast": 4.0, "beta_slow": 1.0},
}
V3_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}
MODELS = {
    "deepseek-v2": ("DeepseekV2", {**LATENT, **V2_GROUPS}),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "rope_parameters": YARN, "n_shared_experts": 1},
    ),
    "deepseek-v2-biased": (
        "DeepseekV2",
        {**LATENT, "attention_bias": True, "first_k_dense_replace": 0, "vocab_size": 67},
    ),
    "deepseek-v3": ("DeepseekV3", {**LATENT, **GROUPS}),
    "deepseek-v3-yarn": ("DeepseekV3", {**LATENT, **GROUPS, "rope_parameters": V3_YARN}),
    "deepseek-v3-biased": (
        "DeepseekV3",
        {
            **{**LATENT, **GROUPS, "attention_bias": True, "rope_interleave": False},
            **{"q_lora_rank": None, "n_shared_experts": 2, "norm_topk_prob": False},
        },
    ),
    "kimi-k2": (
        "DeepseekV3",
        {
            **{**LATENT, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
            "rope_parameters": {**V3_YARN, "beta_fast": 1.0},
        },
    ),
}
# Without modules of multi-token prediction and without the biases of routers, which are variables:
# huggingface.co/deepseek-ai/{DeepSeek-V2-Lite,DeepSeek-V2,DeepSeek-V3},
# huggingface.co/moonshotai/Kimi-K2-Base.
PUBLISHED = {
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "kimi-k2": 1_026_408_232_448 - 60 * 384,
}
REFUSED = {
    "deepseek_v2": {"scoring_func": "sigmoid"},
    "deepseek_v3": {"scoring_func": "softmax"},
}
