"""Mistral: a Llama with sliding-window attention (Jiang et al., arXiv:2310.06825).

```python
config = dataclasses.replace(PRESETS["mistral-7b"], layers=4)
model = spmd.from_nnx(config.build)
```

The first release has a window of 4,096 tokens, later ones have none. The heads of Mistral NeMo are
narrower than d_model / heads.
"""

import dataclasses

from spmd.models.llama import LlamaConfig


@dataclasses.dataclass(frozen=True)
class MistralConfig(LlamaConfig):
    """Shape of a Mistral."""


PRESETS = {
    "test": MistralConfig(
        vocab=64, d_model=32, layers=2, heads=4, kv_heads=2, d_ff=64, head_dim=4, window=5
    ),
    "mistral-7b": MistralConfig(32_000, 4096, 32, 32, 8, 14_336, window=4096),
    "mistral-7b-v0.3": MistralConfig(32_768, 4096, 32, 32, 8, 14_336, rope_theta=1e6),
    "mistral-nemo-12b": MistralConfig(
        vocab=131_072,
        d_model=5120,
        layers=40,
        heads=32,
        kv_heads=8,
        d_ff=14_336,
        rope_theta=1e6,
        head_dim=128,
    ),
}
"""Published shapes by name, and a small one for tests."""
