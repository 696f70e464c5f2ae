"""Job files, which start a run on machines and start it again: Slurm, Kubernetes, TPU VMs."""
