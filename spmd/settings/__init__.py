"""Settings named in a config: recipes of matmuls, compression, host memory.

Of all modules of a train step, only these and `spmd.precision` map a name to a technique: `fp16` to
loss scaling, `fp8-delayed` to delayed scaling, `int8` to codes between devices, `params` to host
memory. The plan reads only what these values say of themselves: their transforms, their problems,
how they send a parameter, where they store it.
"""
