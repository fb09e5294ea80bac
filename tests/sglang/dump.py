"""A second loader for the server process: it writes every parameter to a file, and knows nothing of fp8bridge."""

import torch


def dump(model, named_tensors):
    path = bytes(named_tensors[0][1].cpu().numpy()).decode()
    torch.save({name: p.detach().cpu() for name, p in model.named_parameters()}, path)
