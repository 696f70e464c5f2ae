"""Partition rules: tables over parameter paths, and the specs that follow from them."""
