#!/bin/sh
# A run on two nodes of a Slurm cluster: the shipped config own-text, on the .txt files of the folder that you are in,
# which all nodes share.
#
#     sh examples/slurm_run.sh --mesh.fsdp 16
#     sh examples/slurm_run.sh --mesh.fsdp 16 --steps 5000 --model.layers 8
#
# The flags are those of `spmd train`. When the cluster wants its nodes back, the run saves, is requeued and goes on.
set -eu
spmd script slurm own-text --nodes 2 --file own-text.sbatch -- "$@"
job=$(sbatch --parsable --wait own-text.sbatch)
tail -n 20 "own-text-$job.log"
