"""The benchmark, small: that it runs, that its figures are of verified syncs, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8bridge.bench.baseline import DeviceSink, run_baseline
from fp8bridge.bench.ceilings import broadcast_gbytes_per_s, copy_gbytes_per_s, socket_gbytes_per_s
from fp8bridge.bench.servers import ScatterServer, start_servers
from fp8bridge.bench.source import SyntheticSource
from fp8bridge.bench.sweeps import sweep
from fp8bridge.bench.sync import Case, both_formats, run_case, share_of_ceiling
from fp8bridge.bench.table import COLUMNS, markdown, rows
from fp8bridge.cli.app import main
from fp8bridge.errors import ConfigError, VerifyError
from fp8bridge.layout import ServerLayout

from .support import assert_same_bits, expected_wire

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
TINY = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256, "num_experts": 4,
    "moe_intermediate_size": 64, "vocab_size": 300, "tie_word_embeddings": False,
}  # fmt: skip


def case(**changes):
    return Case(**{"label": "tiny", "hf_config": TINY, "transport": "loopback", "bucket_nbytes": 50_000} | changes)


def source(**options):
    return SyntheticSource(TINY, device=CPU, **options)


def test_the_synthetic_parameters_are_the_models_tensors_however_fused():
    made = source()
    metas, _ = made.describe()
    whole = dict(made.whole())
    assert {m.name: m.shape for m in metas} == {name: tuple(t.shape) for name, t in whole.items()}
    assert whole["model.layers.1.mlp.experts.3.down_proj.weight"].shape == (128, 64)
    assert all(t.dtype == torch.bfloat16 and t.float().std() > 0.01 for t in whole.values())
    assert {m.name for m in source(only=".experts.").describe()[0]} == {n for n in whole if ".experts." in n}


@pytest.mark.parametrize("format", ["fp8", "bf16"])
def test_a_sync_leaves_the_reference_bits_on_a_scatter_server(format):
    """The benchmark's own server and source are right, apart from what `verify` says."""
    import fp8bridge

    made, config = source(), case(format=format).config
    made.hf_config = config
    layout = ServerLayout.from_hf_config(config)
    server = ScatterServer("a", layout=layout, device=CPU)
    with fp8bridge.connect(made, [server], transport="loopback", bucket_nbytes=40_000) as bridge:
        for version in (1, 2):
            made.step()
            bridge.update_weights(version=version)
            bridge.verify()
    assert_same_bits(server.tensors, expected_wire(dict(made.whole()), layout))


def is_whole(result):
    assert result["seconds"] > 0
    assert result["predicted_s"] > 0
    assert result["baseline"]["seconds"] > 0
    assert result["ceiling"]["gbytes_per_s"] > 0
    assert share_of_ceiling(result) > 0
    assert len(result["reports"]) == 2
    json.dumps(result)


def test_both_formats_with_baseline_give_a_table():
    made = source()
    results = [run_case(c, made) for c in both_formats(case(repeat=1))]
    assert [len(row) for row in rows(results)] == [len(COLUMNS)] * 2
    assert markdown(results).count("\n") == 4
    for result in results:
        is_whole(result)
    fp8, bf16 = results
    assert fp8["nbytes"] < 0.7 * bf16["nbytes"] == 0.7 * bf16["nbytes_in"]


@pytest.mark.parametrize("transport", ["zmq", "nccl"])
def test_servers_of_other_processes_give_the_same(transport):
    result = run_case(case(transport=transport, repeat=1), source())
    is_whole(result)
    assert result["ceiling"]["kind"] == {"zmq": "raw socket", "nccl": "raw broadcast"}[transport]


def test_no_speed_is_shown_for_a_sync_that_does_not_verify(monkeypatch):
    take = ScatterServer.take

    def corrupt(self, packed):
        take(self, packed)
        self.tensors["model.norm.weight"].view(torch.uint8)[0] ^= 1

    monkeypatch.setattr(ScatterServer, "take", corrupt)
    with pytest.raises(VerifyError, match=r"model\.norm\.weight"):
        run_case(case(), source())


def test_the_baseline_must_have_the_bytes_of_the_sync():
    made = source()
    layout = ServerLayout.from_hf_config(case().config)
    names = expected_wire(dict(made.whole()), layout)
    with pytest.raises(VerifyError, match="the baseline's bytes"):
        run_baseline(
            made,
            layout,
            DeviceSink(),
            rule="sglang",
            bucket_nbytes=1 << 20,
            servers=1,
            expected=dict.fromkeys(names, 0),
        )


def test_sweeps_change_one_thing():
    assert [c.bucket_nbytes >> 20 for c in sweep("bucket", case(), [1, 2])] == [1, 2]
    assert [c.servers for c in sweep("servers", case())] == [1, 2, 4]
    assert [c.hf_config["num_hidden_layers"] for c in sweep("model", case())] == [1, 2]
    by_tensors = sweep("tensors", case(), [2, 8])
    assert [c.hf_config["num_experts"] * c.hf_config["moe_intermediate_size"] for c in by_tensors] == [256, 256]
    with pytest.raises(ConfigError, match="divides experts"):
        sweep("tensors", case(hf_config={"num_hidden_layers": 1}))


def test_ceilings_are_measured():
    assert copy_gbytes_per_s(CPU, 1 << 20) > 0.01
    assert socket_gbytes_per_s(1 << 16, streams=2, total_nbytes=1 << 20) > 0.001
    assert broadcast_gbytes_per_s(1 << 16, backend="gloo", devices=(CPU, CPU), total_nbytes=1 << 20) > 0.001


def test_a_transport_without_a_server_of_its_own_asks_for_urls():
    layout = ServerLayout.from_hf_config(case().config)
    with pytest.raises(ConfigError, match="give their URLs"), start_servers("ipc", 1, layout, device=CPU):
        pass
    with start_servers("ipc", ["http://a:1"], layout, device=CPU) as servers:
        assert servers == ["http://a:1"]


@pytest.mark.parametrize("change", [{"format": "int4"}, {"repeat": 0}])
def test_a_wrong_case_is_refused(change):
    with pytest.raises(ConfigError):
        case(**change)


def test_the_command_writes_json_table_and_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    words = [
        "bench",
        "sync",
        "--model",
        str(config),
        "--transport",
        "loopback",
        "--bucket-mb",
        "0.05",
        "--repeat",
        "1",
    ]
    with pytest.raises(SystemExit) as stop:
        main(
            [
                *words,
                "--repeat",
                "1",
                "--sweep",
                "model",
                "--steps",
                "1,2",
                "--device",
                "cpu",
                "--out",
                str(tmp_path / "out"),
            ]
        )
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "of ceiling" in out
    assert "config.json, 2 layers" in out
    results = json.loads((tmp_path / "out.json").read_text())
    assert [r["format"] for r in results] == ["fp8", "bf16"] * 2
    assert (tmp_path / "out.md").read_text().startswith("| configuration |")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_script_of_the_promises_runs_small(tmp_path):
    # Servers of other processes take most of its time, and have tests of their own.
    groups = ["--group", "device", "--group", "experts"]
    command = [sys.executable, str(ROOT / "benchmarks/targets.py"), "--small", "--out", str(tmp_path), *groups]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "targets.json").read_text())
    assert len(data["verdicts"]) == 6
    assert all(v["wanted"] for v in data["verdicts"])
    assert "| promise |" in (tmp_path / "targets.md").read_text()
    assert "function calls" in (tmp_path / "host_profile.txt").read_text()
