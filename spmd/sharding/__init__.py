"""Partition rules: tables over parameter paths, and the specs derived from them."""
