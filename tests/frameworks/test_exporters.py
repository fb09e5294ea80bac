"""mbridge's own export of a live Megatron-Core model as a source."""

import pytest

pytest.importorskip("mbridge", reason="mbridge is not installed: make test-frameworks does")

from .support import run_snippet, save_model

pytestmark = pytest.mark.frameworks

# mbridge knows the names that parameters have in Transformer Engine's fused layers, which a CPU has not.
ON_THE_CPU = """
from mbridge.core.bridge import Bridge

FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
to_hf = Bridge._weight_name_mapping_mcore_to_hf

def unfused(self, name):
    for local, fused in FUSED.items():
        name = name.replace(local, fused)
    return to_hf(self, name)

Bridge._weight_name_mapping_mcore_to_hf = unfused
"""

# The model of the page is drawn at random; the same draw goes through MegatronSource.
COMPARE = """
import fp8bridge
from fp8bridge.adapters.megatron import MegatronSource

connect = fp8bridge.connect

def both(source, servers):
    import inspect
    page = inspect.stack()[1].frame.f_globals
    reference = MegatronSource(page["model"], page["folder"])
    server = fp8bridge.LoopbackServer(layout=fp8bridge.ServerLayout.from_hf_config(FP8_CONFIG))
    with connect(reference, [server], transport="loopback") as bridge:
        bridge.update_weights(version=1)
        print("reference", sorted(server.checksums().items()))
    return connect(source, servers)

from tests.support import FP8_CONFIG
import torch
torch.manual_seed(5)
fp8bridge.connect = both
"""


def test_the_snippets_export_arrives_as_the_megatron_tables_send_it(server, tmp_path):
    save_model(tmp_path / "model")
    lines = run_snippet(
        "exporters.md", tmp_path, tmp_path / "model", server.server.url, before=ON_THE_CPU + COMPARE
    ).splitlines()
    assert [line.split()[0] for line in lines] == ["reference", "1", "2"]
    assert server.version() == "2"
    found = sorted((name, int(value, 16)) for name, value in server.checksums().items())
    assert lines[0] == f"reference {found}"
