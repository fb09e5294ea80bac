"""What holds for every test: one torch thread, and memory that shouts when read before it is written."""

import sys

import pytest

from tests import ports


@pytest.fixture(scope="session", autouse=True)
def torch_setup():
    """Tests that never import torch stay quick: it is set up only where a test module imported it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    # Several ranks and servers share a machine that may have two cores.
    torch.set_num_threads(1)
    # Makes torch.empty fill its memory (NaN, or the largest integer): a byte that a kernel forgets
    # to write is then wrong on every run, not now and then.
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture
def free_port():
    """Call it for a TCP port on loopback that nothing listens on."""

    return ports.free_port
