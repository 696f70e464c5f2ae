"""Job files for Slurm, Kubernetes and TPU VMs."""
