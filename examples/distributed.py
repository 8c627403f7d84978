"""Train the digits classifier on several processes: DistributedDataParallel around a model with an ODE block.

    torchrun --standalone --nproc-per-node 2 -m examples.distributed [--epochs 12] [--batch 64] [--seed 0]

Without torchrun it runs as a single process. Each process takes its share of every batch, and DistributedDataParallel
averages the gradients that MALI computes; the ODE block needs nothing else. There is one process per GPU if there are
GPUs (nccl); otherwise the processes run on the CPU (gloo).
"""

from __future__ import annotations

import argparse
import gc
import os
import time

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from examples.demo import LEARNING_RATE, Digits, Dynamics, accuracy, read_digits
from torchmali import FixedStep
from torchmali.nn import ODEBlock

CHANNELS = 16


def classifier() -> nn.Sequential:
    """Stem, ODE block, head: 8 x 8 grey images to 10 logits."""
    return nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1),
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(),
        ODEBlock(Dynamics(CHANNELS), controller=FixedStep(1 / 8)),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(16 * CHANNELS, 10),
    )


def shares(n: int, batch: int, epoch: int, rank: int, world: int) -> list[Tensor]:
    """Share of this process in each batch of an epoch: all processes shuffle alike and take every world-th image."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch))
    return [part[rank::world] for part in order.split(batch) if len(part) >= world]


def train(model: DistributedDataParallel, digits: Digits, n_epochs: int, batch: int, console: Console) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    n_batches = n_epochs * len(shares(len(digits.train_images), batch, 0, rank, world))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, n_batches)
    for epoch in range(1, n_epochs + 1):
        for mine in shares(len(digits.train_images), batch, epoch, rank, world):
            loss = F.cross_entropy(model(digits.train_images[mine]), digits.train_labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if rank == 0:
            # model.module: the wrapper would wait for the other processes, to share its buffers with them.
            held_out = accuracy(model.module, digits.test_images, digits.test_labels)
            console.print(f"epoch {epoch:2}/{n_epochs}  held-out {held_out:.1%}")


def same_everywhere(model: nn.Module) -> bool:
    """Whether all processes hold the same weights."""
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = weights.clone()
    dist.broadcast(first, 0)
    agrees = torch.tensor(float(torch.equal(weights, first)), device=weights.device)
    dist.all_reduce(agrees, dist.ReduceOp.MIN)
    return bool(agrees)


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Train in this process, one of the group."""
    torch.manual_seed(options.seed)
    model = DistributedDataParallel(classifier().to(device))
    torch.manual_seed(options.seed + dist.get_rank())  # each process has its own dropout
    digits = Digits(*(x.to(device) for x in read_digits()))
    console, start = Console(highlight=False), time.perf_counter()
    train(model, digits, options.epochs, options.batch, console)
    if not same_everywhere(model):
        raise RuntimeError("The processes ended with different weights.")
    if dist.get_rank() == 0:
        took = time.perf_counter() - start
        console.print(f"processes: {dist.get_world_size()}, all with the same weights; {took:.0f} s")
    dist.barrier()  # no process leaves while another one still waits for it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64, help="images of all processes together (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update({name: value for name, value in alone.items() if "RANK" not in os.environ})
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    try:
        run(options, device)
    finally:
        gc.collect()  # the model, which holds threads of the group
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
