"""What the framework tests share: a model folder, servers, and the snippet of a page, run as its readers would."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "frameworks"


def snippets(page):
    """The Python blocks of docs/frameworks/`page`."""
    text = (PAGES / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run_snippet(page, folder, *arguments, before="", timeout_s=150, **environment):
    """Run the page's first block in a process of its own, in `folder`; what it printed.

    before: code that runs first, to stand in for hardware that the test machine lacks.
    """
    script = folder / "train.py"
    script.write_text(snippets(page)[0])
    code = f"{before}\nimport runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    (folder / "before.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(folder / "before.py"), str(script), *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def save_model(folder, seed=1):
    """A tiny BF16 Qwen3 of random weights with a tokenizer, as Hugging Face folders are; its config as a dict."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    from ..rollout.rig import QWEN3, reference

    config = {key: value for key, value in QWEN3.items() if key not in ("model_type", "torch_dtype")}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**config, dtype="bfloat16")).bfloat16()
    model.load_state_dict(reference(seed, QWEN3).weights.tensors)
    model.save_pretrained(folder)
    words = {f"t{i}": i for i in range(99)} | {"<pad>": 99, "<eos>": 100}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return QWEN3
