#!/usr/bin/env bash
# A workload on TPU slices of a GKE cluster, by XPK (pip install xpk). Its container is
# BASE_IMAGE with this checkout in its working directory, where it is installed first.
# JAX finds the hosts of all slices by the variables that GKE sets.
#
#   CLUSTER=mine WORKLOAD=run1 bash examples/launch/xpk.sh --rounds 20
set -euo pipefail
install="pip install '.[examples]' 'jax[tpu]'"
run="$install && python -m examples.launch.train --cluster auto $*"
xpk workload create \
  --cluster "${CLUSTER:?the name of the GKE cluster}" \
  --workload "${WORKLOAD:?a name for this run}" \
  --tpu-type "${TPU_TYPE:-v5litepod-16}" \
  --num-slices "${SLICES:-2}" \
  --base-docker-image "${BASE_IMAGE:-python:3.12}" \
  --script-dir . \
  --command "${COMMAND:-$run}"
