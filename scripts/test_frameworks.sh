#!/usr/bin/env bash
# The tests of each framework's adapter, each in an environment of its own, since their pins differ:
# scripts/test_frameworks.sh [NAME ...]. What PYTHON (default .venv/bin/python) has is seen from all of them.
# One that cannot be installed is skipped by name and with pip's reason. That none can be is a failure.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ $# -gt 0 ] || set -- ray trl verl areal skyrl openrlhf exporters

told=() tested=0 failed=0
for name; do
  dir=.venv/frameworks/$name tests=(tests/frameworks/test_"$name".py)
  [ "$name" = ray ] && tests+=(tests/frameworks/test_nemo_rl.py)  # needs Ray, and no package of its own
  if [ ! -e "${tests[0]}" ]; then
    echo "unknown framework $name; see tests/frameworks" >&2
    exit 2
  fi
  if [ ! "$dir/.installed" -nt scripts/frameworks_env.sh ]; then
    rm -rf "$dir"
    if ! log=$(scripts/frameworks_env.sh "$name" "$dir" "$python" 2>&1); then
      told+=("$name: skipped, it could not be installed: $(grep -m1 ERROR <<<"$log" || tail -n1 <<<"$log")")
      continue
    fi
    touch "$dir/.installed"
  fi
  tested=1
  if "$dir/bin/python" -m pytest -o filterwarnings=default -W ignore "${tests[@]}"; then
    told+=("$name: passed")
  else
    told+=("$name: failed")
    failed=1
  fi
done
printf '%s\n' "${told[@]}"
[ "$tested" = 1 ] && [ "$failed" = 0 ]
