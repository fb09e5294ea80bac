# Source this on a machine with a GPU and no network: makes `import fp8bridge` work in `python3`.
#   WHEELS=DIR . scripts/gpu_env.sh     also installs the wheels of DIR (Transformer Engine, say) to a folder
#                                       of their own, in front of everything else
# Nothing is downloaded. The editable install needs setuptools, and leaves the dependencies alone.
fp8bridge_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if ! python3 -c "import fp8bridge.kernels" 2>/dev/null; then
  python3 -m pip install -q --no-index --no-build-isolation --no-deps --disable-pip-version-check \
    -e "$fp8bridge_root" || return 1
fi
if [ -n "${WHEELS:-}" ]; then
  fp8bridge_site=$(mktemp -d)
  python3 -m pip install -q --no-index --no-deps --no-compile --disable-pip-version-check \
    --target "$fp8bridge_site" "$WHEELS"/*.whl || return 1
  export PYTHONPATH="$fp8bridge_site${PYTHONPATH:+:$PYTHONPATH}"
fi
