"""Does the engine's CUDA path give plain PyTorch's numbers? To be run where there is a GPU.

    torchrun --nproc-per-node 1 engine/benchmarks/gpu_check.py --output gpu.json      (more processes on more GPUs)

It trains a small GPT-like network twice from the same start, with the plain optimizer on all ranks' batches and with
the engine at several thresholds, and writes the largest difference and the median iteration time of each as JSON.
`--device cpu` runs the same on Gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import dear_engine as dear
from dear_engine.timing import clock_for

STEPS = 20
THRESHOLDS = (1, 2**20, 2**30)
BATCH, SEQUENCE, WIDTH, LAYERS = 8, 64, 256, 6


def main() -> None:
    """Compare, and write what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device, int(os.environ["LOCAL_RANK"]) if arguments.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    reference, plain_s = train_plain(device)
    results = [compare(device, reference, threshold) for threshold in THRESHOLDS]
    if dist.get_rank() == 0:
        report = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
            "torch": torch.__version__,
            "world_size": dist.get_world_size(),
            "plain_iteration_s": plain_s,
            "engine": results,
        }
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
        print(json.dumps(report, indent=2))
    dist.destroy_process_group()


def network(device: torch.device) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, WIDTH)).to(device, torch.float64)


def batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    """(BATCH, SEQUENCE, WIDTH), another one for each step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, SEQUENCE, WIDTH, generator=generator, dtype=torch.float64).to(device)


def train_plain(device: torch.device) -> tuple[list[torch.Tensor], float]:
    """The parameters after the plain optimizer's steps on the mean over all ranks' batches; seconds of one step."""
    model, clock = network(device), clock_for(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            (model(batch(step, rank, device)).square().mean() / dist.get_world_size()).backward()
        optimizer.step()
        clock.mark()
    return [parameter.detach() for parameter in model.parameters()], median(clock.durations_s())


def compare(device: torch.device, reference: list[torch.Tensor], threshold_bytes: int) -> dict[str, float]:
    """How far the engine ends from the reference at a threshold."""
    model, clock = network(device), clock_for(device)
    optimizer = dear.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, threshold_bytes=threshold_bytes, tuner=None
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank(), device)).square().mean().backward()
        optimizer.step()
        clock.mark()
    pairs = zip(model.parameters(), reference, strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    buckets = len(optimizer.plan.buckets)
    optimizer.close()
    return {
        "threshold_bytes": threshold_bytes,
        "buckets": buckets,
        "largest_difference": difference,
        "iteration_s": median(clock.durations_s()),
    }


if __name__ == "__main__":
    main()
