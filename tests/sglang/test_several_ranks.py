"""Several ranks on either side: a server of two TP ranks, and two trainer ranks that both send."""

import pytest
import torch

import fp8bridge
from fp8bridge.sglang import payload
from tests.support import SplitSource, assert_same_bits, expected_wire, run_ranks

from . import rig
from .rig import DUMP, FP8, SglangProcess, connect, fuse, model_folder, weights

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (rig.ENVIRONMENTS / "0.5.23/.installed").exists(),
        reason="no SGLang environments; `make test-sglang` installs them",
    ),
]
WIDE = FP8 | {"head_dim": 128, "intermediate_size": 512}
"""Parts of two TP ranks are whole blocks, as SGLang wants them."""
TP = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = model_folder(tmp_path_factory.mktemp("tp"), WIDE)
    # SGLang wants to know the cores of each TP rank where there are fewer NUMA nodes than ranks.
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    started = SglangProcess("0.5.23", folder, "--load-format", "dummy", "--tp", str(TP), env=cores)
    try:
        yield started.wait_ready(240)
    finally:
        started.close()


def held(server, tmp_path):
    """What each TP rank has now."""
    paths = [str(tmp_path / f"rank-{rank}.pt") for rank in range(TP)]
    server.post("/pause_generation", {"mode": "abort"})
    server.post("/begin_weight_update")
    body = {"serialized_named_tensors": [payload.pack(p.encode()) for p in paths], "load_format": DUMP}
    server.post("/update_weights_from_tensor", body | {"flush_cache": False})
    server.post("/end_weight_update")
    server.post("/continue_generation", {"torch_empty_cache": False})
    return [torch.load(p) for p in paths]


def part(model, rank):
    """By hand: rows of q, k, v, gate, up and both embeddings, columns of o and down, all of the rest."""
    wire = expected_wire(model, fp8bridge.ServerLayout.from_hf_config(WIDE))
    for name, tensor in wire.items():
        axis = 1 if ".o_proj." in name or ".down_proj." in name else 0
        if "proj" in name or "embed" in name or "lm_head" in name:
            wire[name] = tensor.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype).chunk(TP, axis)[rank]
            wire[name] = wire[name].contiguous().view(tensor.dtype)
    return fuse(wire, WIDE)


def check(server, model, tmp_path):
    for rank, found in enumerate(held(server, tmp_path)):
        expected = part(model, rank)
        assert_same_bits({n: found[n] for n in expected}, expected)
        assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("transport", ["nccl", "zmq"])
def test_each_tp_rank_holds_its_part_and_verify_puts_them_together(server, transport, tmp_path):
    model = weights(1 if transport == "nccl" else 2, WIDE)
    with connect([server], model, WIDE, transport=transport) as bridge:
        for _ in range(2):
            for tensor in model.values():
                tensor.mul_(1.25)
            report = bridge.update_weights(version=server.next_version())
            assert bridge.verify() == {server.url: len(bridge.plan.manifest.entries())}
            assert report.servers[server.url].load_way == ("replay" if transport == "zmq" else "load_weights")
        check(server, model, tmp_path)
        sent = bridge.server_checksums()[server.url]
    other = weights(3, WIDE)
    with connect([server], other, WIDE) as bridge:
        bridge.update_weights(version=server.next_version())
        changed = bridge.server_checksums()[server.url]
    assert all(changed[name] != value for name, value in sent.items() if name.endswith("proj.weight"))


def trainer(server, model, work, **options):
    """`work(bridge, rank)` on two trainer ranks, each with random rectangles of the model."""
    port = {"transport": "nccl", "group_backend": "gloo", "bucket_nbytes": 200_000, "pause_mode": "abort"}
    limits = {"open_timeout_s": 20, "bucket_timeout_s": 20, "request_timeout_s": 20}

    def run(rank):
        source = SplitSource(model, rank, 2)
        source.hf_config = WIDE
        with fp8bridge.connect(source, [server.url], **port | limits | options) as bridge:
            return work(bridge, rank)

    return run


def test_two_trainer_ranks_send_each_its_own_buckets(server, tmp_path, monkeypatch):
    model, number = weights(5, WIDE), server.next_version()

    def work(bridge, rank):
        for version in (number, number + 1):
            bridge.update_weights(version=version)
        bridge.verify()
        return len(bridge._transport._lines[server.url]._answers), bridge.plan.manifest.buckets

    answers = run_ranks(2, trainer(server, model, work), monkeypatch)
    (first, buckets), (second, _) = answers
    assert first + second == len(buckets)
    assert min(first, second) > 0, "both send"
    assert server.weight_version() == str(number + 1)
    check(server, model, tmp_path)


def test_a_trainer_rank_that_fails_leaves_a_server_that_claims_nothing(server, tmp_path, monkeypatch):
    model, number = weights(6, WIDE), server.next_version()
    said = []

    def work(bridge, rank):
        def stop(done, total):
            if rank == 1 and not said and done == 1:
                said.append(True)
                raise RuntimeError("out of memory, say")

        with pytest.raises((fp8bridge.BridgeError, RuntimeError), match="out of memory"):
            bridge.update_weights(version=number, on_progress=stop)
        claimed = server.weight_version() if rank == 0 else ""
        state = dict(bridge.servers)[server.url].state
        bridge.admit(server.url)
        bridge.update_weights(version=number + 1)
        bridge.verify()
        return claimed, state

    answers = run_ranks(2, trainer(server, model, work), monkeypatch)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    assert answers[0][0].startswith("incomplete-")
    assert answers[0][1] == "fenced"
    assert server.weight_version() == str(number + 1)
    assert not server.paused()
    check(server, model, tmp_path)
