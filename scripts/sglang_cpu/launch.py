"""Start a real SGLang server where there is no GPU.

SGLang imports a few CUDA builds that its weight path never calls; they are replaced by empty modules.
Model, loader, scheduler, HTTP server and weight updates are SGLang's own. A BF16 model generates; block
FP8 has no CPU kernel there, so an FP8 model holds, loads and updates its weights and generates nothing.
"""

import importlib.machinery
import sys
import types

ABSENT = (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
    "torchaudio",
    "torchaudio.compliance",
    "torchaudio.compliance.kaldi",
    "torchaudio.functional",
    "torchaudio.transforms",
    "cutlass",
    "vllm",
    "vllm._custom_ops",
)


class Nothing:
    """May be imported, called and looked into, and does nothing."""

    def __getattr__(self, name):
        return Nothing()

    def __call__(self, *args, **kwargs):
        return Nothing()


def replace(name):
    def attribute(wanted):
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return Nothing()

    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    module.__version__ = "0.0"
    module.__getattr__ = attribute
    sys.modules[name] = module


for absent in ABSENT:
    replace(absent)

from sglang.launch_server import run_server  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402

ON_A_CPU = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--skip-server-warmup", "--skip-tokenizer-init", "--max-total-tokens", "4096"),
    *("--max-running-requests", "8", "--mem-fraction-static", "0.2", "--sleep-on-idle"),
]

if __name__ == "__main__":
    run_server(prepare_server_args([*ON_A_CPU, *sys.argv[1:]]))
