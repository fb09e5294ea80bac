#!/usr/bin/env bash
# A virtual environment with a real SGLang server that runs on a CPU, and this checkout in it for its loader.
#   scripts/sglang_cpu/install.sh VERSION FOLDER        versions: see the requirements files beside this script
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
version=$1 folder=$2
requirements=$here/requirements-$version.txt
[ -e "$requirements" ] || { echo "no requirements for SGLang $version in $here" >&2; exit 1; }
stamp=$folder/.installed
[ -e "$stamp" ] && [ "$stamp" -nt "$requirements" ] && exit 0
echo "Installing SGLang $version for the CPU into $folder: some minutes the first time."
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install -qq --disable-pip-version-check --no-deps -r "$requirements"
"$folder/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e "$here/../.."
touch "$stamp"
