"""DTensors in three gloo processes, cut by rows (as FSDP2 does) and by columns, and an exporter of whole tensors."""

import datetime

import torch
import torch.distributed as dist

import fp8bridge
from fp8bridge.adapters.state_dict import ExportSource, StateDictSource
from tests.support import FP8_CONFIG, FP8_LAYOUT, ZmqThreadServer

WORLD = 3


def make_model():
    """Hugging Face-like names; 130 rows over three ranks are uneven, 2 rows leave a rank without any."""
    torch.manual_seed(3)
    proj = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(70, 130), "down_proj": torch.nn.Linear(130, 2)})
    return torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([proj])})}).bfloat16()


def run(rank, port, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    model = make_model()
    found = {"expected": {n: t.clone() for n, t in model.state_dict().items()}}
    rows = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in model.state_dict().items()}
    cols = {n: distribute_tensor(t, mesh, [Shard(t.dim() - 1)]) for n, t in model.state_dict().items()}
    found["rows"], found["gathered"] = sync(StateDictSource(rows, FP8_CONFIG))
    found["columns"], _ = sync(StateDictSource(cols, FP8_CONFIG))
    found["export"], _ = sync(ExportSource(lambda: ((n, t.full_tensor()) for n, t in rows.items()), FP8_CONFIG))
    if rank == 0:
        torch.save(found, path)
    dist.barrier()
    dist.destroy_process_group()


def sync(source):
    server = ZmqThreadServer("a", layout=FP8_LAYOUT)
    with fp8bridge.connect(source, [server], collective_timeout_s=60) as bridge:
        bridge.update_weights(version=1)
        bridge.verify()
        gathered = bridge.plan.gathered_nbytes()
    return {n: t.clone() for n, t in server.tensors.items()}, gathered
