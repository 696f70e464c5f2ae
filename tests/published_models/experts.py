"""Decoders with experts: Qwen, OLMoE, Granite, ERNIE, Hunyuan, DBRX, Cohere."""

from tests.published_models.common import LLAMA, PLAIN, SCALED, THETA, WINDOWED

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OLMOE = {"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0}
QWEN2 = {**LLAMA, **EXPERTS, "shared_expert_intermediate_size": 40}
GRANITE = {
    **{**LLAMA, "num_local_experts": 8, "attention_multiplier": 0.3, "embedding_multiplier": 3.0},
    **{"residual_multiplier": 0.5, "logits_scaling": 1.7},
}
ERNIE = {
    **{**LLAMA, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24},
    "pad_token_id": 0,
}
HUNYUAN = {**LLAMA, "num_experts": 8, "pad_token_id": 0}
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, **THETA}
COHERE = {**WINDOWED, "num_experts": 8, "head_dim": 8, "logit_scale": 0.7}
DBRX = {
    **{"vocab_size": 64, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 128},
    **{"pad_token_id": 0, "rope_parameters": PLAIN},
}
MODELS = {
    "qwen3-moe": ("Qwen3Moe", {**LLAMA, **EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-biased": (
        "Qwen3Moe",
        {
            **{**LLAMA, **EXPERTS, "head_dim": 16, "attention_bias": True, "vocab_size": 67},
            **{"mlp_only_layers": [0, 2], "tie_word_embeddings": True},
        },
    ),
    "qwen3-moe-window": (
        "Qwen3Moe",
        {
            **{**LLAMA, **EXPERTS, "use_sliding_window": True, "sliding_window": 4},
            **{"decoder_sparse_step": 2, "num_experts_per_tok": 1, "rope_parameters": THETA},
        },
    ),
    "qwen2-moe": ("Qwen2Moe", QWEN2),
    "qwen2-moe-plain": (
        "Qwen2Moe",
        {
            **{**QWEN2, "qkv_bias": False, "norm_topk_prob": True, "tie_word_embeddings": True},
            **{"decoder_sparse_step": 2, "num_key_value_heads": 4},
        },
    ),
    "qwen2-moe-windows": (
        "Qwen2Moe",
        {
            **{**QWEN2, "use_sliding_window": True, "sliding_window": 4, "mlp_only_layers": [0, 1]},
            **{"max_window_layers": 3, "num_hidden_layers": 5},
        },
    ),
    "olmoe": ("Olmoe", {**LLAMA, **OLMOE}),
    "olmoe-biased": (
        "Olmoe",
        {
            **{**LLAMA, **OLMOE, "attention_bias": True, "norm_topk_prob": True},
            **{"vocab_size": 67, "tie_word_embeddings": True, "num_experts_per_tok": 1},
        },
    ),
    "flex-olmo": ("FlexOlmo", {**LLAMA, **OLMOE, "rope_parameters": SCALED}),
    "flex-olmo-biased": (
        "FlexOlmo",
        {
            **{**LLAMA, **OLMOE, "attention_bias": True, "norm_topk_prob": True},
            **{"head_dim": 16, "tie_word_embeddings": True},
        },
    ),
    "granite-moe": ("GraniteMoe", GRANITE),
    "granite-moe-biased": (
        "GraniteMoe",
        {
            **{**LLAMA, "attention_bias": True, "num_experts_per_tok": 1, "vocab_size": 67},
            "tie_word_embeddings": True,
        },
    ),
    "granite-moe-shared": ("GraniteMoeShared", {**GRANITE, "shared_intermediate_size": 40}),
    "granite-moe-shared-none": (
        "GraniteMoeShared",
        {**GRANITE, "num_local_experts": 4, "tie_word_embeddings": True},
    ),
    "ernie-4.5": ("Ernie4_5", {**LLAMA, "head_dim": 16, "pad_token_id": 0}),
    "ernie-4.5-biased": (
        "Ernie4_5",
        {
            **{**LLAMA, "head_dim": 8, "pad_token_id": 0, "use_bias": True, "vocab_size": 67},
            "tie_word_embeddings": False,
        },
    ),
    "ernie-4.5-moe": ("Ernie4_5_Moe", ERNIE),
    "ernie-4.5-moe-middle": (
        "Ernie4_5_Moe",
        {
            **{**ERNIE, "num_hidden_layers": 6, "moe_layer_end_index": 4, "moe_k": 1},
            **{"moe_layer_interval": 2, "moe_num_shared_experts": 1, "vocab_size": 67},
        },
    ),
    "ernie-4.5-moe-not-shared": (
        "Ernie4_5_Moe",
        {
            **{**ERNIE, "moe_num_shared_experts": 0, "moe_layer_start_index": 0},
            "tie_word_embeddings": False,
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1", {**HUNYUAN, "moe_topk": 2, "head_dim": 8}),
    "hunyuan-moe-alpha": (
        "HunYuanMoEV1",
        {
            **{**HUNYUAN, "moe_topk": [1] * 4, "attention_bias": True, "vocab_size": 67},
            **{"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": ALPHA},
        },
    ),
    "hy3": ("HYV3", {**LLAMA, **EXPERTS, "head_dim": 8, "router_scaling_factor": 1.5}),
    "hy3-biased": (
        "HYV3",
        {
            **{**LLAMA, **EXPERTS, "head_dim": 16, "attention_bias": True, "vocab_size": 67},
            **{"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
            **{"num_shared_experts": 2, "tie_word_embeddings": True, "num_experts_per_tok": 1},
        },
    ),
    "cohere2-moe": ("Cohere2Moe", {**COHERE, "num_shared_experts": 1}),
    "cohere2-moe-dense": (
        "Cohere2Moe",
        {
            **{**COHERE, "num_shared_experts": 2, "shared_expert_combination_strategy": "sum"},
            **{"expert_selection_fn": "sigmoid", "first_k_dense_replace": 2, "head_dim": 16},
            **{"prefix_dense_intermediate_size": 40, "attention_bias": True, "vocab_size": 67},
        },
    ),
    "cohere2-moe-rms": (
        "Cohere2Moe",
        {
            **{**COHERE, "expert_selection_fn": "sigmoid", "norm_topk_prob": False},
            **{"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2},
            **{"rms_norm_eps": 1e-4, "tie_word_embeddings": False},
        },
    ),
    "dbrx": (
        "Dbrx",
        {
            **DBRX,
            "attn_config": {"clip_qkv": 0.5, "kv_n_heads": 2, **THETA},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 2},
        },
    ),
    # Without a limit, DBRX of `transformers` 5.24 fails: `torch.clamp` needs one.
    "dbrx-not-normalised": (
        "Dbrx",
        {
            **{**DBRX, "vocab_size": 67},
            "attn_config": {"clip_qkv": 100.0, "kv_n_heads": 4, **THETA},
            "ffn_config": {"ffn_hidden_size": 24, "moe_normalize_expert_weights": None},
        },
    ),
}
# Elements in the tensors of the published checkpoints, without modules of multi-token prediction and
# without the biases of routers, which are variables: huggingface.co/Qwen/{Qwen1.5-MoE-A2.7B,
# Qwen3-30B-A3B,Qwen3-235B-A22B}, allenai/OLMoE-1B-7B-0924, ibm-granite/granite-3.0-1b-a400m-base,
# baidu/ERNIE-4.5-{0.3B,21B-A3B,300B-A47B}-PT, tencent/{Hunyuan-A13B-Instruct,Hy3-preview},
# databricks/dbrx-base.
PUBLISHED = {
    "ernie-4.5-0.3b": 360_748_032,
    "ernie-4.5-21b-a3b": 21_825_437_888 - 27 * 64,
    "ernie-4.5-300b-a47b": 299_484_163_264 - 51 * 64,
    "granite-3.0-1b-a400m": 1_334_628_352,
    "dbrx": 131_596_523_520,
    "hunyuan-a13b": 80_393_183_232,
    "hy3-preview": 295_033_528_320,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen1.5-moe": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
REFUSED = {
    "dbrx": {"rope_theta": 7e4},
    "ernie4_5": {"use_bias": "no"},
    "ernie4_5_moe": {"moe_norm_min": 0.1},
    "flex_olmo": {"num_experts": 0},
    "granitemoe": {"residual_multiplier": 0},
    "granitemoeshared": {"shared_intermediate_size": -1},
    "hunyuan_v1_moe": {"moe_topk": [1, 2]},
    "hy_v3": {"mlp_bias": True},
    "cohere2_moe": {"expert_selection_fn": "tanh"},
    "olmoe": {"clip_qkv": 0.5},
    "qwen2_moe": {"mlp_only_layers": [0, 1]},
    "qwen3_moe": {"decoder_sparse_step": 3},
}
