"""GLM, and decoders with shared experts or biases of routers."""

from tests.published_models.common import LLAMA, SCALED

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
}
# Elements in the tensors of the published checkpoints: huggingface.co/THUDM/glm-4-9b-chat-hf,
# THUDM/{GLM-4-9B-0414,GLM-4-32B-0414}.
PUBLISHED = {
    "glm-4-9b-chat": 9_399_951_360,
    "glm4-9b": 9_400_279_040,
    "glm4-32b": 32_566_081_536,
}
REFUSED = {
    "glm": {"partial_rotary_factor": 1.5},
    "glm4": {"hidden_act": "gelu"},
}
