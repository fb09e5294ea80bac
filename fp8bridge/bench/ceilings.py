"""What the machine can do at best, measured in the same run: a device copy, raw sockets, raw broadcasts."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist

from ..errors import ConfigError

_WORD = b"k"


def copy_gbytes_per_s(device: torch.device, nbytes: int, repeat: int = 5) -> float:
    """Bytes read plus bytes written per second of the best copy of `nbytes` on the device."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(_copy_s(source, target) for _ in range(repeat + 1))
    return 2 * nbytes / best / 1e9


def _copy_s(source: torch.Tensor, target: torch.Tensor) -> float:
    if source.device.type != "cuda":
        start = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - start
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    target.copy_(source)
    marks[1].record()
    torch.cuda.synchronize(source.device)
    milliseconds: float = marks[0].elapsed_time(marks[1])
    return milliseconds / 1e3


def socket_gbytes_per_s(message_nbytes: int, *, streams: int = 1, total_nbytes: int = 1 << 30) -> float:
    """A plain TCP connection on loopback to another process, which reads each message into the same memory and
    answers one byte; two messages are in flight. `streams` connections share the bytes."""
    messages = max(2, total_nbytes // message_nbytes // streams)
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        child = context.Process(target=_read_all, args=(port, message_nbytes, messages, streams), daemon=True)
        child.start()
        pairs = [listener.accept()[0] for _ in range(streams)]
        payload = memoryview(bytearray(message_nbytes))
        threads = [threading.Thread(target=_send_all, args=(s, payload, messages)) for s in pairs]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        for each in pairs:
            each.close()
        child.join()
    return message_nbytes * messages * streams / seconds / 1e9


def broadcast_gbytes_per_s(
    message_nbytes: int, *, backend: str, devices: tuple[torch.device, torch.device], total_nbytes: int = 1 << 30
) -> float:
    """One broadcast after the other from one rank to another, each a process of its own on its device. Two NCCL
    ranks on one GPU need NCCL 2.30 and its environment (CONTRIBUTING.md), which the processes inherit."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    messages = max(2, total_nbytes // message_nbytes)
    options = (port, backend, message_nbytes, messages, answers)
    children = [
        context.Process(target=_broadcast, args=(rank, str(device), *options), daemon=True)
        for rank, device in enumerate(devices)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise ConfigError(
            f"two ranks could not broadcast over {backend} on {devices[0]} and {devices[1]}; their words are above"
        )
    seconds: float = answers.get()
    return message_nbytes * messages / seconds / 1e9


def _broadcast(
    rank: int, device: str, port: int, backend: str, nbytes: int, messages: int, answers: SimpleQueue[float]
) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def one() -> None:
        dist.broadcast(memory, src=0)
        if memory.device.type == "cuda":
            torch.cuda.synchronize(memory.device)

    for _ in range(2):
        one()
    start = time.perf_counter()
    for _ in range(messages):
        one()
    dist.barrier()
    if rank == 0:
        answers.put(time.perf_counter() - start)
    dist.destroy_process_group()


def _send_all(connection: socket.socket, payload: memoryview, messages: int) -> None:
    for i in range(messages):
        connection.sendall(payload)
        if i:
            connection.recv(1)
    connection.recv(1)


def _read_all(port: int, nbytes: int, messages: int, streams: int) -> None:
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    threads = [threading.Thread(target=_read, args=(c, nbytes, messages)) for c in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for connection in connections:
        connection.close()


def _read(connection: socket.socket, nbytes: int, messages: int) -> None:
    memory = memoryview(bytearray(nbytes))
    for _ in range(messages):
        at = 0
        while at < nbytes:
            got = connection.recv_into(memory[at:])
            if not got:
                return
            at += got
        connection.sendall(_WORD)
