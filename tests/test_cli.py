"""The command line as a shell sees it: what is printed, where, and the exit code."""

import json
import re
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp8bridge
import fp8bridge.cli.doctor
import fp8bridge.cli.plan
import fp8bridge.cli.quantization
from fp8bridge.cli.app import main
from fp8bridge.config import RULES
from fp8bridge.engine import PRESETS, FP8EngineConfig, bytes_per_parameter
from fp8bridge.engine.memory import total
from fp8bridge.kernels import reference

QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LIGHT = "import sys; heavy = {'torch', 'numpy', 'zmq', 'httpx', 'transformers', 'starlette'} & set(sys.modules)"


@pytest.fixture
def config(tmp_path):
    """Path of a model's config.json; call it with what is to be changed in it."""

    def write(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(QWEN3_8B | changes))
        return str(path)

    return write


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "120")

    def call(*words):
        with pytest.raises(SystemExit) as stop:
            main(words)
        done = capsys.readouterr()
        return stop.value.code, done.out, done.err

    return call


def test_version(run):
    assert run("--version") == (0, f"fp8bridge {fp8bridge.__version__}\n", "")


@pytest.mark.parametrize("start", [["-m", "fp8bridge"], ["-c", "from fp8bridge.__main__ import main; main()"]])
def test_both_ways_to_start(start):
    done = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"fp8bridge {fp8bridge.__version__}\n"


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == 0
    names = ["demo", "plan", "convert", "doctor", "verify", "serve", "keys", "config", "bench"]
    assert re.findall(r"^│ (\w+)  +\w", out, re.MULTILINE) == names


def test_config_shows_every_preset_with_its_bytes(run):
    code, out, err = run("config", "show")
    assert (code, err) == (0, "")
    for name, make in PRESETS.items():
        assert re.search(rf"^ {name} .* {total(bytes_per_parameter(make())):.4g} ", out, re.MULTILINE), name


def test_config_of_a_preset_says_where_its_fields_land(run):
    code, out, _ = run("config", "show", "--preset", "fp8lm_o2")
    assert code == 0
    assert re.search(r"master_dtype +float16 +\*", out)
    assert re.search(r"OptimizerConfig +main_params_dtype +torch.float16", out)
    _, out, _ = run("config", "show", "--preset", "fp8lm_o2", "--dp", "8", "--json")
    (facts,) = json.loads(out).values()
    assert facts["fields"] == FP8EngineConfig.fp8lm_o2().as_dict()
    assert facts["megatron"]["OptimizerConfig"]["exp_avg_dtype"] == "torch.uint8"
    assert facts["bytes_per_parameter"]["hopper"]["linear"]["master"] == 2 / 8


def test_config_of_a_file_is_checked(run, tmp_path):
    path = tmp_path / "fp8.yaml"
    path.write_text("preset: hopper_blockwise\nbf16_layers_at_end: 1\n")
    assert run("config", "show", str(path))[0] == 0
    path.write_text("recpie: blockwise\n")
    code, out, err = run("config", "show", str(path))
    assert (code, out) == (1, "")
    assert "did you mean 'recipe'" in err
    code, _, err = run("config", "show", str(path), "--preset", "fp8lm_o1")
    assert code == 1
    assert "not both" in err
    assert "known: hopper_blockwise" in run("config", "show", "--preset", "nope")[2]


def test_convert_there_and_back(run, tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    weight = (torch.randn(200, 130) * 0.05).bfloat16()
    tensors = {"model.layers.0.mlp.down_proj.weight": weight, "model.norm.weight": torch.ones(130).bfloat16()}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(QWEN3_8B))
    code, out, _ = run("convert", str(source), str(tmp_path / "fp8"), "--to", "fp8", "--rule", "te_pow2", "--json")
    facts = json.loads(out)
    assert (code, facts["changed"], facts["copied"], facts["rule"]) == (0, 1, 1, "te_pow2")
    found = load_file(tmp_path / "fp8" / "model.safetensors")
    codes, scales = reference.quantize(weight, "te_pow2")
    assert torch.equal(found["model.layers.0.mlp.down_proj.weight"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found["model.layers.0.mlp.down_proj.weight_scale_inv"], scales)
    code, out, _ = run("convert", str(tmp_path / "fp8"), str(tmp_path / "bf16"), "--to", "bf16")
    assert code == 0
    assert "1 weights to bf16, 1 tensors as they were" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nowhere", "out", "--to", "fp8"), "has neither model.safetensors.index.json nor model.safetensors"),
        (("nowhere", "out", "--to", "bf16", "--rule", "te"), "--rule says how to quantize"),
    ],
)
def test_convert_errors_are_one_line(run, words, says):
    code, out, err = run("convert", *words)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert says in err


def test_help_and_plan_load_nothing_heavy(config):
    """So that both answer at once; also, `plan` works where torch does not."""
    code = (
        "from fp8bridge.cli.app import main\n"
        f"try: main(['plan', '--config', {config()!r}])\n"
        f"except SystemExit: {LIGHT}; print(f'heavy: {{sorted(heavy)}}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("heavy: []\n"), done.stdout + done.stderr


def test_plan_is_the_preview_and_the_largest_buckets(run, config):
    code, out, _ = run("plan", "--config", config(), "--tp", "2", "--pp", "2", "--quantization", "fp8")
    assert code == 0
    assert "FP8 e4m3, 128x128 blocks, float32 scales" in out
    assert "399 tensors" in out
    assert "copy        147 tensors" in out
    assert "quantize    252 tensors" in out
    assert "predicted wire time" in out
    assert re.search(r"largest of \d+ buckets", out)
    assert len(re.findall(r"^ +\d+ +rank \d", out, re.MULTILINE)) == fp8bridge.cli.plan.LARGEST


def test_plan_as_json_is_exact(run, config):
    code, out, _ = run(
        *("plan", "--config", config(), "--tp", "8", "--dp", "2", "--quantization", "fp8", "--json"),
        *("--servers", "4", "--wire-gbytes-per-s", "20", "--bucket-mb", "512"),
    )
    assert code == 0
    facts = json.loads(out)
    hidden, ffn, kv, vocab, layers = 4096, 12288, 1024, 151936, 36
    codes = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn)
    rest = 2 * (2 * vocab * hidden + layers * (2 * hidden + 2 * 128) + hidden)
    assert facts["nbytes_in"] == 2 * codes + rest
    assert facts["nbytes_wire"] == codes + codes // 128**2 * 4 + rest
    assert facts["actions"]["quantize"]["tensors"] == 7 * layers
    assert facts["rule"] == "sglang"
    assert facts["servers"] == 4
    busiest = max(facts["nbytes_by_sender"].values())
    assert (
        facts["prediction"]["wire_s"]
        >= busiest * 4 / 20e9
        == pytest.approx(facts["prediction"]["link_nbytes"]["busiest_sender_out"] / 20e9)
    )


QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_hidden_layers": 48,
    "vocab_size": 151936,
}  # fmt: skip


def test_plan_of_a_model_with_experts_spreads_them_over_their_ranks(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    sizes = ("--tp", "4", "--dp", "2", "--ep", "8", "--etp", "1", "--quantization", "fp8", "--json")
    code, out, _ = run("plan", "--config", str(tmp_path), *sizes)
    assert code == 0
    facts = json.loads(out)
    experts = 48 * 128 * 3 * 2048 * 768
    assert facts["actions"]["quantize"]["tensors"] == 48 * (128 * 3 + 4)
    assert experts < facts["nbytes_wire"] < 1.1 * experts
    # Experts are whole on their ranks: what travels between ranks is attention, embeddings and norms alone.
    assert facts["nbytes_gathered"] < 0.06 * experts
    assert max(facts["nbytes_by_sender"].values()) < 1.2 * facts["nbytes_wire"] / 8


def test_plan_takes_uneven_stages_and_refuses_what_is_no_list(run, config):
    sizes = ("plan", "--config", config(), "--pp", "2", "--quantization", "fp8")
    assert run(*sizes, "--layers", "20,16")[0] == 0
    code, _, err = run(*sizes, "--layers", "20,15")
    assert (code, "add up to 36" in err) == (1, True)
    code, _, err = run(*sizes, "--layers", "20;16")
    assert (code, "no list of numbers" in err) == (2, True)


def test_plan_reads_a_folder_and_the_configs_own_quantization(run, config):
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model.layers.0"]}
    folder = config(quantization_config=quant).removesuffix("/config.json")
    code, out, _ = run("plan", "--config", folder, "--json")
    assert code == 0
    assert json.loads(out)["layout"]["ignored"] == ["layers.0"]
    assert json.loads(out)["actions"]["quantize"]["tensors"] == 7 * 35


def test_plan_takes_a_quantization_from_a_file(run, config, tmp_path):
    path = tmp_path / "quant.json"
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    for text in (quant, QWEN3_8B | {"quantization_config": quant}):
        path.write_text(json.dumps(text))
        code, out, _ = run("plan", "--config", config(), "--quantization", str(path), "--json")
        assert code == 0
        assert json.loads(out)["rule"] == "ue8m0"


def test_plan_says_when_nothing_would_be_quantized(run, config):
    assert "--quantization fp8 plans for block-FP8 servers" in run("plan", "--config", config())[1]
    assert "--quantization fp8" not in run("plan", "--config", config(), "--quantization", "none")[1]


def test_plan_of_a_model_by_name_predicts_seconds_and_bytes_over_links(run):
    words = ("plan", "--model", "Qwen3-30B-A3B", "--trainer", "tp4pp5ep4etp1", "--servers", "2xtp4")
    code, out, _ = run(*words, "--links", "wire=1,ingest=4,bucket_s=0,fixed_s=0")
    assert code == 0
    assert "20 trainer ranks -> 2 servers on 8 GPUs" in out
    assert re.search(r"predicted update: \d+\.\d+ s .*wire decides", out)
    assert re.search(r"20 senders of .* to .* \(rank \d+\)", out)
    facts = json.loads(run(*words, "--links", "wire=1,ingest=4", "--json")[1])
    assert facts["prediction"]["link_nbytes"]["all_senders_out"] == 2 * facts["nbytes_wire"]
    assert facts["layout"]["block"] == [128, 128], "a model by name is planned for block-FP8 servers"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--model", "GPT-5"], 1, "no model 'GPT-5'"),
        (["--model", "Qwen3-8B", "--config", "."], 2, "either --config or --model"),
        (["--model", "Qwen3-8B", "--trainer", "t8"], 1, "not written as tp8pp4ep8"),
        (["--model", "Qwen3-8B", "--servers", "0"], 1, "not written as 16xtp8"),
        (["--model", "Qwen3-8B", "--links", "wires=1"], 1, "wires=1"),
    ],
)
def test_plan_refuses_what_it_cannot_read(run, words, code, says):
    found = run("plan", *words)
    assert (found[0], says in found[1] + found[2]) == (code, True)


@pytest.mark.parametrize("rule", RULES)
def test_plan_takes_every_rule_of_the_library(run, config, rule):
    code, out, _ = run("plan", "--config", config(), "--quantization", "fp8", "--rule", rule, "--json")
    assert code == 0
    assert json.loads(out)["rule"] == rule


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "Usage"),
        (["bogus"], "No such command 'bogus'"),
        (["plan"], "give either --config or --model"),
        (["plan", "--config", "/no/such/file"], "does not exist"),
        (["plan", "--config", ".", "--tp", "0"], "--tp"),
        (["plan", "--config", ".", "--tp", "two"], "--tp"),
        (["plan", "--config", ".", "--rule", "nearest"], "te_pow2"),
        (["plan", "--config", ".", "--bucket-mb", "0"], "--bucket-mb"),
        (["plan", "--config", ".", "--senders", "last"], "--senders"),
        (["demo", "--steps", "0"], "--steps"),
        (["serve"], "give --config"),
        (["serve", "--config", ".", "--model-path", "."], "give --config"),
        (["serve", "--config", ".", "--port", "65536"], "--port"),
        (["doctor", "--timeout-s", "0"], "--timeout-s"),
    ],
)
def test_wrong_usage_is_exit_code_2(run, words, says):
    code, out, err = run(*words)
    assert code == 2
    assert says in out + err


@pytest.mark.parametrize(
    ("changes", "words", "says"),
    [
        ({}, ["--tp", "3"], "heads cannot be split over tp 3"),
        ({}, ["--pp", "5"], "36 layers cannot be split evenly over pp 5"),
        ({}, ["--dtype", "int4"], "dtype int4"),
        ({}, ["--dtype", "float32"], "allow_cast"),
        ({}, ["--quantization", "none", "--rule", "te"], "not quantized; drop it"),
        ({}, ["--quantization", "no.json"], "cannot read no.json"),
        ({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}, [], "no Megatron table"),
        ({"hidden_size": None}, [], "hidden_size is None"),
        ({"quantization_config": {"quant_method": "awq"}}, [], "'awq'"),
    ],
)
def test_a_failure_is_one_line_and_exit_code_1(run, config, changes, words, says):
    code, out, err = run("plan", "--config", config(**changes), *words)
    assert (code, out) == (1, "")
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert says in err


def test_a_config_that_is_not_json(run, tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{")
    code, _, err = run("plan", "--config", str(tmp_path))
    assert code == 1
    assert "is not JSON" in err


def test_a_missing_package_points_to_the_doctor(run, config, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "fp8bridge.rollout.app", raising=False)
    code, _, err = run("serve", "--config", config())
    assert code == 1
    assert re.fullmatch(r"error: [^\n]*uvicorn[^\n]*; `fp8bridge doctor` says what to install\n", err)


def test_a_bug_is_one_line_too_and_says_how_to_see_more(run, config, monkeypatch):
    monkeypatch.setattr(fp8bridge.cli.plan, "_by_rank", lambda *_, **__: 1 / 0)
    code, _, err = run("plan", "--config", config())
    assert code == 1
    assert err == "error: ZeroDivisionError: division by zero (a bug; --traceback shows where)\n"


@pytest.mark.parametrize("position", [0, 3])
def test_a_traceback_is_shown_on_request(config, position):
    words = ["plan", "--config", config(), "--tp", "3"]
    words.insert(position, "--traceback")
    done = subprocess.run([sys.executable, "-m", "fp8bridge", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "megatron_layout.py" in done.stderr


def test_demo_passes_its_options_and_exit_code_on(run, monkeypatch):
    import fp8bridge.demo.run

    seen = {}
    monkeypatch.setattr(fp8bridge.demo.run, "run_demo", lambda **options: seen.update(options) or 1)
    assert run("demo", "--steps", "3", "--servers", "1", "--tp", "1", "--pp", "4", "--seed", "7", "--json")[0] == 1
    assert seen == {"steps": 3, "servers": 1, "tp": 1, "pp": 4, "seed": 7, "json_out": True, "stock": False}


@pytest.fixture
def served(monkeypatch):
    """What `serve` hands to the rollout server, instead of running it: (ServeConfig, host, port)."""
    import fp8bridge.rollout.app

    calls = []
    monkeypatch.setattr(fp8bridge.rollout.app, "serve", lambda *call: calls.append(call))
    return calls


def test_serve_a_config_with_random_weights(run, config, served):
    assert run("serve", "--config", config(), "--quantization", "fp8", "--seed", "3", "--port", "0")[0] == 0
    [(settings, host, port)] = served
    assert settings.hf_config == QWEN3_8B | {"quantization_config": fp8bridge.cli.quantization.BLOCK_FP8}
    assert (settings.weights, settings.tokenizer, settings.seed) == (None, None, 3)
    assert (host, port) == ("127.0.0.1", 0)


@pytest.mark.parametrize("tokenizer", [True, False])
def test_serve_a_checkpoint_with_its_tokenizer_if_it_has_one(run, config, served, tmp_path, monkeypatch, tokenizer):
    config()
    if tokenizer:
        (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setenv("FP8BRIDGE_API_KEY", "secret")
    assert run("serve", "--model-path", str(tmp_path))[0] == 0
    [(settings, *_)] = served
    assert settings.weights == str(tmp_path)
    assert settings.tokenizer == (str(tmp_path) if tokenizer else None)
    assert settings.api_key == "secret"


def test_a_server_started_from_the_shell_answers_the_doctor(config, free_port):
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 48}
    path = config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    port = free_port()
    command = [sys.executable, "-m", "fp8bridge", "serve", "--config", path, "--quantization", "fp8"]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if "startup complete" in line:
                break
        found = fp8bridge.cli.doctor.check_server(f"http://127.0.0.1:{port}", timeout_s=10)
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=30)[1]
    finally:
        process.kill()
        process.wait()
    assert found.usable, found.error
    assert found.layout.startswith("FP8 e4m3, 128x128")
    assert found.weight_version == "default"
    assert found.paused is False
    assert process.returncode == 130, "as a shell calls Ctrl-C"
    assert "Traceback" not in rest
