"""Parity of layouts: every step of a mesh against one device, and bugs to find."""
