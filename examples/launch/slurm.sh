#!/usr/bin/env bash
#SBATCH --job-name=drjax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log
# One task for each GPU: under Slurm, JAX gives a process the GPU with the index of its
# task on the node. It finds the other processes by Slurm's variables.
#
#   sbatch examples/launch/slurm.sh --rounds 20      # from the root of a checkout
set -euo pipefail
srun --kill-on-bad-exit=1 "${PYTHON:-python}" -m examples.launch.train --cluster auto "$@"
