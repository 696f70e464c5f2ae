"""Every way to turn a batch into gradients: each is a `GradFn`, or takes one and returns one."""
