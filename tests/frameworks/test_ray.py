"""Trainer ranks as actors of a real local Ray, and a rollout server in a process of its own."""

import contextlib
import os

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make test-frameworks does")

import ray

from fp8bridge.adapters.ray import RayBridge
from fp8bridge.adapters.state_dict import StateDictSource
from fp8bridge.errors import ConfigError, NonFiniteError, RankError, ServerUnreachableError, VersionError
from fp8bridge.staging import tensor_checksum

from ..rollout.rig import QWEN3, reference
from ..support import expected_wire
from .support import ROOT, run_snippet, save_model

pytestmark = pytest.mark.frameworks


class Trainer:
    """A rank that holds the whole model of a seed."""

    def __init__(self, rank, size, port):
        import torch

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
        self.model = reference(1, QWEN3).weights.tensors

    def scale(self, factor):
        for tensor in self.model.values():
            tensor.mul_(factor)

    def poison(self):
        self.model["model.norm.weight"][0] = float("nan")

    def die_in_the_next_update(self):
        from fp8bridge.gather import Gather

        Gather.check = lambda *_: os._exit(1)


@pytest.fixture(scope="module")
def cluster():
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": env}, log_to_driver=False)
    yield
    ray.shutdown()


@contextlib.contextmanager
def trainers(port, size=2):
    actors = [ray.remote(Trainer).remote(rank, size, port) for rank in range(size)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def source(trainer):
    return StateDictSource(trainer.model, QWEN3)


def assert_holds(server, *factors):
    """The weights of the trainer's seed, multiplied by these one after the other."""
    model = reference(1, QWEN3).weights.tensors
    for tensor in model.values():
        for factor in factors:
            tensor.mul_(factor)
    wire = expected_wire(model)
    assert server.checksums() == {name: f"{tensor_checksum(tensor):016x}" for name, tensor in wire.items()}


def test_the_snippet_syncs_fsdp_actors(server, tmp_path):
    save_model(tmp_path / "model")
    lines = run_snippet("ray.md", tmp_path, tmp_path / "model", server.server.url).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["1", "2", "3"]
    assert all(line.endswith("{}") for line in lines[:3])
    assert server.version() == "3"
    assert_holds(server, 1.25, 1.25, 1.25)


def test_actors_sync_and_errors_reach_the_driver_as_they_are(cluster, server, free_port):
    with trainers(free_port()) as actors:
        with RayBridge(actors, source, [server.server.url], bucket_nbytes=30_000) as bridge:
            assert bridge.preview().startswith("plan ")
            report = bridge.update_weights(version=1)
            assert list(report.servers) == [server.server.url]
            assert set(bridge.verify()) == {server.server.url}
            assert_holds(server)
            with pytest.raises(VersionError, match="version 1 is not larger"):
                bridge.update_weights(version=1)
            ray.get([a.scale.remote(0.5) for a in actors])
            bridge.update_weights(version=2)
            assert_holds(server, 0.5)
            ray.get(actors[0].poison.remote())
            with pytest.raises(NonFiniteError, match=r"model\.norm\.weight"):
                bridge.update_weights(version=3)
        with pytest.raises(ConfigError, match="this actor has no bridge"):
            bridge.verify()
        with pytest.raises(ServerUnreachableError):
            RayBridge(actors, source, [f"http://127.0.0.1:{free_port()}"])
    assert server.version() == "2"
    assert len(server.generate()["output_ids"]) == 12


def test_an_actor_that_dies_in_an_update_is_named_and_the_server_goes_on(cluster, server, free_port):
    with trainers(free_port()) as actors:
        bridge = RayBridge(actors, source, [server.server.url], collective_timeout_s=20)
        bridge.update_weights(version=1)
        ray.get(actors[1].die_in_the_next_update.remote())
        with pytest.raises(RankError, match="rank"):
            bridge.update_weights(version=2)
        with pytest.raises(RankError, match="trainer rank 1 is gone"):
            bridge.verify()
    assert server.version() == "1"
    assert len(server.generate()["output_ids"]) == 12


def test_no_actors_are_refused():
    with pytest.raises(ConfigError, match="one handle per trainer rank"):
        RayBridge([], source, ["http://127.0.0.1:1"])
