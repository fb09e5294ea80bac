#!/usr/bin/env bash
# The tests marked `gpu`: scripts/test_gpu.sh [pytest arguments]. WHEELS=DIR as in gpu_env.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/gpu_env.sh
# Most of the time goes into compiling kernels, which several processes share well.
workers=()
if python3 -c "import xdist" 2>/dev/null; then workers=(-n "${WORKERS:-8}" -p no:benchmark); fi
exec python3 -m pytest -m gpu "${workers[@]}" "${@:-tests}"
