#!/usr/bin/env bash
# An environment for the tests of one framework's adapter: scripts/frameworks_env.sh NAME DIR [PYTHON]
#   NAME    verl, trl, ray, areal, skyrl, openrlhf or exporters
#   DIR     where it goes; what PYTHON (default .venv/bin/python) has is seen from it
# The framework comes without its dependencies: most need CUDA. Named beside it is what its interface imports on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1 dir=$2 python=$(realpath -s "${3:-.venv/bin/python}")

ray=(ray==2.60.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1)
omegaconf=(omegaconf==2.4.0 antlr4-python3-runtime==4.9.3)
datasets=(datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 pandas==3.1.1 pyarrow==26.0.1 six==1.17.0 xxhash==4.1.0)
case $name in
  verl) packages=(verl==0.9.1 "${ray[@]}" "${omegaconf[@]}" "${datasets[@]}" accelerate==1.15.0 cloudpickle==3.1.3
    codetiming==1.4.0 hydra-core==1.3.8 importlib_metadata==10.2.0 peft==0.21.2 pyvers==0.2.3 tensordict==0.15.3
    torchdata==0.11.0 zipp==4.1.2) ;;
  trl) packages=(trl==1.16.0 "${datasets[@]}" accelerate==1.15.0 psutil==7.2.2) ;;
  ray) packages=("${ray[@]}") ;;
  areal) packages=(areal==1.0.4 "${ray[@]}" "${omegaconf[@]}" "${datasets[@]}" accelerate==1.15.0 aiofiles==25.1.0
    blinker==1.9.0 cloudpickle==3.1.3 colorlog==6.12.0 distro==1.9.0 Flask==3.1.3 hydra-core==1.3.8 itsdangerous==2.2.0
    jiter==0.19.0 lark==1.3.1 latex2sympy2_extended==1.11.0 llvmlite==0.50.0 math-verify==0.9.0 mbridge==0.15.1
    numba==0.68.1 openai==3.57.0 peft==0.21.2 psutil==7.2.2 pybase64==1.5.1 sniffio==1.3.1 tenacity==9.2.1
    torchdata==0.11.0 uvloop==0.23.0 Werkzeug==3.1.9) ;;
  skyrl) packages=(skyrl==0.3.0 skyrl-gym==0.4.0 "${ray[@]}" "${omegaconf[@]}" jaxtyping==0.3.11 loguru==0.7.3
    pandas==3.1.1 pyarrow==26.0.1 pydantic==2.11.9 pydantic_core==2.33.2 six==1.17.0) ;;
  openrlhf) packages=(openrlhf==0.11.2 "${ray[@]}" "${datasets[@]}" pylatexenc==2.11 torchdata==0.11.0) ;;
  exporters) packages=(mbridge==0.15.1) ;;
  *) echo "unknown framework $name; see the head of $0" >&2; exit 2 ;;
esac

"$python" -m venv --without-pip "$dir"
site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
below=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$below')" > "$site/below.pth"
"$python" -m pip --python "$dir/bin/python" install -qq --disable-pip-version-check --no-deps "${packages[@]}"
