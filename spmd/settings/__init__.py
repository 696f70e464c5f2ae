"""Values that a user names in a config: recipes of matmuls, compression, host memory.

Here and in `spmd.precision`, and nowhere else in what makes a train step, a name leads to a
technique: `fp16` to loss scaling, `fp8-delayed` to delayed scaling, `int8` to codes between
devices, `params` to host memory. The plan reads only what these values say of themselves: their
transforms, their problems, how they send a parameter, where they store it.
"""
