#!/usr/bin/env bash
#SBATCH --job-name=drjax-ray
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log
# One node of Ray on each host. The driver runs on the first one, and Ray ends with it.
#
#   sbatch examples/cluster/slurm.sh --workers 4 --devices 4   # from a checkout's root
set -euo pipefail
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
srun --kill-on-bad-exit=1 ray symmetric-run \
  --address "$first:${PORT:-6379}" --min-nodes "$SLURM_JOB_NUM_NODES" \
  -- "${PYTHON:-python}" -m examples.cluster.train --address auto "$@"
