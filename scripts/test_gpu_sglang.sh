#!/usr/bin/env bash
# The GPU tests with real SGLang servers, trainer and servers on one GPU. NCCL_LIB: a libnccl.so.2 of 2.30 or newer,
# which allows two ranks on one GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/gpu_env.sh
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0
[ -z "${NCCL_LIB:-}" ] || export LD_PRELOAD=$NCCL_LIB
"${PYTHON:-python3}" -m pytest -m gpu -p no:cacheprovider tests/test_gpu_sglang.py "$@"
