"""Decoders with fused kernels, parallel residual branches or partial rotary positions."""

from tests.published_models.common import LLAMA, THETA

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
MODELS = {
    "phi3": ("Phi3", {**PHI3, "sliding_window": 4}),
    "phi3-odd-vocabulary": ("Phi3", {**PHI3, "vocab_size": 67, "num_key_value_heads": 4}),
    "phi3-short-texts": ("Phi3", {**PHI3, **SHORT_TEXTS}),
    "phi3-long-texts": ("Phi3", {**PHI3, **LONG_TEXTS, "tie_word_embeddings": True}),
}
# Elements in the tensors of the published checkpoints; a head that is the embedding is counted
# once: huggingface.co/microsoft/{Phi-3-mini-4k-instruct,Phi-3-medium-4k-instruct,phi-4}.
PUBLISHED = {
    "phi3-mini-4k": 3_821_079_552,
    "phi3-medium-4k": 13_960_238_080,
    "phi4": 14_659_507_200,
}
REFUSED = {
    "phi3": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
}
