"""Delayed scaling of fp8 matmuls: scales from the largest magnitudes of the last steps.

It is a transform of the gradient. It adds an array that rides on each quantized kernel; the array's
derivative is the magnitudes that the layer has seen. Its contract is
`spmd.model_interface.grad_transform`; a recipe names it (`spmd.settings.quantize`), and the
quantized products of `spmd.layers` fill its histories. The plan, the gradients and the step may not
import it.
"""
