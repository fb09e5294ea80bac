#!/usr/bin/env bash
# A virtual environment with a real vLLM server that runs on a CPU, and this checkout in it for its weight-transfer
# backend: scripts/vllm_cpu/install.sh FOLDER
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1 requirements=$here/requirements.txt
stamp=$folder/.installed
[ -e "$stamp" ] && [ "$stamp" -nt "$requirements" ] && exit 0
echo "Installing vLLM for the CPU into $folder: some minutes the first time."
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install -qq --disable-pip-version-check --no-deps -r "$requirements"
"$folder/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e "$here/../.."
touch "$stamp"
