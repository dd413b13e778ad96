#!/usr/bin/env bash
# Train on all GPUs of this machine (or NPROC CPU ranks): launch/one_node.sh CONFIG.yaml [key=value ...]
set -euo pipefail
NPROC=${NPROC:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
[ "$NPROC" -gt 0 ] || { echo "no GPU found; set NPROC to the number of CPU ranks" >&2; exit 2; }
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec python -m torch.distributed.run --standalone --nproc-per-node "$NPROC" -m megarl train "$@"
