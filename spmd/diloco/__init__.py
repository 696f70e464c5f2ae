"""DiLoCo: replicas with steps of their own, synchronized every few steps.

Between slices, ordinary data parallelism sends every gradient of every step. With DiLoCo
(arXiv:2311.08105) each slice takes H steps of an inner optimizer by itself. Then an outer optimizer
gets the mean of how far the replicas have moved, as if it were a gradient. In its streaming form
(arXiv:2501.18512) fragments of the parameters are synchronized at different steps, in few bits.
"""
