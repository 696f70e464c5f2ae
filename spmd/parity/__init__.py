"""Parity of layouts: every step of a mesh against one device, and bugs that it must find."""
