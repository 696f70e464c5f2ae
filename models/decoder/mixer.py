"""Facts about a token mixer that the network needs; a mixer that says nothing has these."""

from spmd.models.decoder.rotary import Rotary


class MixerSpec:
    """Base of the specs of token mixers: no attention, no positions, no window."""

    @property
    def window(self) -> int | None:
        """Tokens that each one attends to; 0 for all preceding ones or no attention."""
        return 0

    @property
    def rotary(self) -> Rotary | None:
        """Rotary positions; None where the order of tokens has no angles."""
        return None

    @property
    def rotary_key(self) -> tuple[Rotary, int] | None:
        """Rotary positions and the width of what is rotated; None without positions."""
        return None

    @property
    def attention_width(self) -> int:
        """Width of all query heads together; 0 without attention."""
        return 0

    @property
    def kv_heads(self) -> int:
        """Key/value heads; 0 without attention."""
        return 0

    @property
    def kv_width(self) -> int:
        """Width of all key heads together; 0 without attention."""
        return 0

    @property
    def reach(self) -> int:
        """Window with as many keys for a token; 0 for all preceding ones."""
        return self.window or 0

    @property
    def needs_positions(self) -> bool:
        """Whether the mixer reads `LayerInputs.positions`."""
        return False
