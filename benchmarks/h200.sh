#!/usr/bin/env bash
# Everything docs/performance.md says about an H200, in one run: benchmarks/h200.sh [--out DIR]
# About four minutes. On a single GPU `nccl` is measured where NCCL is 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1
# NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 are set. WHEELS=DIR as in scripts/gpu_env.sh (pyzmq). Results go to --out, else $OUT, else benchmarks/results/h200.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/gpu_env.sh
out=${OUT:-benchmarks/results/h200}
if [ "${1:-}" = "--out" ]; then out=$2; shift 2; fi
exec python3 benchmarks/targets.py --out "$out" "$@"
