#!/usr/bin/env bash
# PROCESSES processes on this machine, each with DEVICES virtual devices of the CPU: what
# a cluster runs, to try it. Arguments go to the training run.
set -euo pipefail
python=${PYTHON:-python}
processes=${PROCESSES:-2}
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=${DEVICES:-2}
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')

pids=()
for ((i = 0; i < processes; i++)); do
  "$python" -m examples.launch.train --coordinator "127.0.0.1:$port" \
    --processes "$processes" --process "$i" "$@" &
  pids+=("$!")
done
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
for pid in "${pids[@]}"; do
  wait "$pid"
done
