"""GLM, and decoders with shared experts or biases of routers."""

from tests.published_models.common import LLAMA, MIXED, PLAIN, SCALED, THETA, WINDOWED

LATENT = {
    **{**LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 4},
    **{"q_lora_rank": 24, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6},
}
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, **THETA},
    **{"beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.8},
}

EXPERTS = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "pad_token_id": 0,
}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
EXAONE_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
AFMOE = {**EXAONE_EXPERTS, "pad_token_id": 0}
MELLUM = AFMOE
LAGUNA = {**AFMOE, "shared_expert_intermediate_size": 40}
KOLIBRI = LAGUNA
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
DENSE_LAST = ["sparse", "dense", "sparse"]
BY_KIND = {
    "full_attention": {**SCALED, "partial_rotary_factor": 0.5},
    "sliding_attention": PLAIN,
}
MODELS = {
    "glm": ("Glm", {**LLAMA, "head_dim": 16, "pad_token_id": 0}),
    "glm-plain": (
        "Glm",
        {
            **{**LLAMA, "head_dim": 8, "pad_token_id": 0, "attention_bias": False},
            **{"vocab_size": 67, "tie_word_embeddings": True, "partial_rotary_factor": 1.0},
        },
    ),
    "glm4": ("Glm4", {**LLAMA, "head_dim": 16, "pad_token_id": 0, "rms_norm_eps": 1e-5}),
    "glm4-plain": (
        "Glm4",
        {
            **{**LLAMA, "head_dim": 16, "pad_token_id": 0, "attention_bias": False},
            **{"tie_word_embeddings": True, "rope_parameters": SCALED},
        },
    ),
    "youtu": ("Youtu", LATENT),
    "youtu-biased": (
        "Youtu",
        {
            **{**LATENT, "attention_bias": True, "tie_word_embeddings": False, "q_lora_rank": None},
            **{"rope_interleave": False, "rope_parameters": YARN, "vocab_size": 67},
        },
    ),
    "minicpm3": ("MiniCPM3", {**LATENT, "dim_model_base": 16}),
    "minicpm3-biased": (
        "MiniCPM3",
        {
            **{**LATENT, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
            **{"q_lora_rank": None, "scale_depth": None, "dim_model_base": None, "scale_emb": 1},
        },
    ),
    "glm4-moe": ("Glm4Moe", {**LLAMA, **EXPERTS, "head_dim": 16}),
    "glm4-moe-biased": (
        "Glm4Moe",
        {
            **{**LLAMA, **EXPERTS, **GROUPS, "head_dim": 16, "attention_bias": True},
            **{"use_qk_norm": True, "first_k_dense_replace": 2, "n_shared_experts": 2},
            **{"norm_topk_prob": False, "vocab_size": 67, "partial_rotary_factor": 0.25},
        },
    ),
    "glm4-moe-top-1": (
        "Glm4Moe",
        {
            **{**LLAMA, **EXPERTS, "num_experts_per_tok": 1, "first_k_dense_replace": 0},
            **{"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": SCALED},
        },
    ),
    "glm4-moe-lite": ("Glm4MoeLite", {**LATENT, **EXPERTS}),
    "glm4-moe-lite-mixed": (
        "Glm4MoeLite",
        {
            **{**LATENT, **EXPERTS, **GROUPS, "mlp_layer_types": DENSE_LAST},
            **{"attention_bias": True, "rope_interleave": False, "q_lora_rank": None},
        },
    ),
    "dots1": ("Dots1", {**LLAMA, **EXPERTS, "n_shared_experts": 2, "first_k_dense_replace": 1}),
    "dots1-windows": (
        "Dots1",
        {
            **{**LLAMA, **EXPERTS, **GROUPS, "n_shared_experts": 1, "attention_bias": True},
            **{"sliding_window": 4, "max_window_layers": 2, "norm_topk_prob": True},
            **{"head_dim": 16, "first_k_dense_replace": 3, "vocab_size": 67},
        },
    ),
    "solar-open": ("SolarOpen", {**LLAMA, **EXPERTS, "head_dim": 16}),
    "solar-open-biased": (
        "SolarOpen",
        {
            **{**LLAMA, **EXPERTS, **GROUPS, "head_dim": 16, "attention_bias": True},
            **{"rope_parameters": SCALED, "tie_word_embeddings": True, "vocab_size": 67},
        },
    ),
    "minimax-m2": ("MiniMaxM2", {**LLAMA, **LOCAL_EXPERTS, "head_dim": 16, "rotary_dim": 8}),
    "minimax-m2-top-1": (
        "MiniMaxM2",
        {
            **{**LLAMA, **LOCAL_EXPERTS, "head_dim": 8, "num_experts_per_tok": 1},
            **{"tie_word_embeddings": True, "vocab_size": 67, "rope_parameters": SCALED},
        },
    ),
    "exaone-moe": ("ExaoneMoe", {**WINDOWED, **EXAONE_EXPERTS, "first_k_dense_replace": 5}),
    "exaone-moe-full": (
        "ExaoneMoe",
        {
            **{**LLAMA, **EXAONE_EXPERTS, **GROUPS, "num_shared_experts": 2, "head_dim": 16},
            **{"layer_types": ["full_attention"] * 4, "vocab_size": 67},
            **{"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]},
        },
    ),
    "afmoe": ("Afmoe", {**WINDOWED, **AFMOE, "head_dim": 16, "num_dense_layers": 2}),
    "afmoe-plain": (
        "Afmoe",
        {
            **{**MIXED, **AFMOE, "head_dim": 8, "num_dense_layers": 0, "mup_enabled": True},
            **{"attention_bias": True, "num_shared_experts": 1, "route_scale": 2.5},
            **{"vocab_size": 67, "tie_word_embeddings": True},
        },
    ),
    "laguna": ("Laguna", {**LLAMA, **LAGUNA, "head_dim": 16}),
    "laguna-heads": (
        "Laguna",
        {
            **{**MIXED, **LAGUNA, "head_dim": 16, "gating": "per-element", "attention_bias": True},
            **{"num_attention_heads_per_layer": [2, 4, 4, 4, 2, 2], "rope_parameters": BY_KIND},
            **{"moe_router_logit_softcapping": 0.5, "moe_routed_scaling_factor": 2.5},
            **{"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3},
        },
    ),
    "mellum": ("Mellum", {**LLAMA, **MELLUM, "head_dim": 16}),
    "mellum-mixed": (
        "Mellum",
        {
            **{**MIXED, **MELLUM, "head_dim": 16, "attention_bias": True, "norm_topk_prob": False},
            **{"rope_parameters": {**BY_KIND, "full_attention": YARN}, "vocab_size": 67},
            **{"mlp_layer_types": ["sparse", "dense"] * 3, "tie_word_embeddings": True},
        },
    ),
    "kolibri1": ("Kolibri1", {**WINDOWED, **KOLIBRI, "head_dim": 16}),
    "kolibri1-full": (
        "Kolibri1",
        {
            **{**LLAMA, **KOLIBRI, "head_dim": 8, "norm_topk_prob": True},
            **{"layer_types": ["full_attention"] * 4, "vocab_size": 67},
        },
    ),
    "axk1": ("AXK1", {**LATENT, **EXPERTS, **GROUPS}),
    "axk1-mixed": (
        "AXK1",
        {
            **{**LATENT, **EXPERTS, **GROUPS, "mlp_layer_types": DENSE_LAST, "vocab_size": 67},
            **{"attention_bias": True, "rope_interleave": False, "rope_parameters": YARN},
            **{"tie_word_embeddings": True, "norm_topk_prob": False},
        },
    ),
}
# Elements in the tensors of the published checkpoints, without modules of multi-token prediction and
# without the biases of routers, which are variables: huggingface.co/THUDM/glm-4-9b-chat-hf,
# THUDM/{GLM-4-9B-0414,GLM-4-32B-0414}, tencent/Youtu-LLM-2B, openbmb/MiniCPM3-4B,
# zai-org/{GLM-4.5,GLM-4.5-Air,GLM-4.7-Flash}, rednote-hilab/dots.llm1.base, upstage/Solar-Open-100B,
# LGAI-EXAONE/K-EXAONE-236B-A23B, MiniMaxAI/MiniMax-M2,
# arcee-ai/Trinity-Mini.
PUBLISHED = {
    "glm-4-9b-chat": 9_399_951_360,
    "glm4-9b": 9_400_279_040,
    "glm4-32b": 32_566_081_536,
    "k-exaone-236b": 236_571_150_336,
    "minicpm3-4b": 4_073_875_968,
    "minimax-m2": 228_689_748_992,
    "solar-open-100b": 102_651_793_408,
    "trinity-mini": 26_123_970_560,
    "youtu-2b": 1_961_560_064,
    "dots.llm1": 142_774_373_888,
    "glm-4.5": 352_797_814_784,
    "glm-4.5-air": 106_852_245_504,
    "glm-4.7-flash": 29_943_390_976,
}
REFUSED = {
    "afmoe": {"route_norm": False},
    "axk1": {"q_lora_rank": None},
    "kolibri1": {"hidden_act": "gelu"},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "mellum": {"rope_parameters": {"rope_theta": 1e4}},
    "dots1": {"topk_method": "greedy"},
    "exaone_moe": {"mlp_layer_types": ["dense"]},
    "glm": {"partial_rotary_factor": 1.5},
    "glm4": {"hidden_act": "gelu"},
    "glm4_moe": {"first_k_dense_replace": 4},
    "glm4_moe_lite": {"mlp_layer_types": ["sparse", "experts", "sparse"]},
    "minicpm3": {"scale_emb": 0},
    "minimax_m2": {"use_routing_bias": False, "rotary_dim": 9},
    "solar_open": {"first_k_dense_replace": 1},
    "youtu": {"num_key_value_heads": 2},
}
