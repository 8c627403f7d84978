"""What each of two processes does in test_distributed.py. Spawned: it has to be importable."""

import copy
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchmali as tm
from torchmali.nn import ODEBlock

METHODS: list[dict[str, Any]] = [
    {"controller": tm.FixedStep(0.1)},
    {"controller": tm.AdaptiveStep(1e-4, 1e-5)},
    {"controller": tm.FixedStep(0.1), "gradient": tm.MALI(exact=True)},
    {"solver": tm.RK4(), "controller": tm.FixedStep(0.1), "gradient": tm.ACA()},
    {"solver": tm.RK4(), "controller": tm.FixedStep(0.1), "gradient": tm.Adjoint()},
]


class Slope(nn.Module):
    def __init__(self, in_training: bool):
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 4)
        self.norm = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.3)) if in_training else nn.Identity()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(y)))) * (1 + t)


def model(how: dict[str, Any], in_training: bool = False, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    block = ODEBlock(Slope(in_training), **how)
    return nn.Sequential(nn.Linear(2, 4), block, nn.Linear(4, 1)).to(dtype)


def loss(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def parts(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """For each process one; the second is the harder one and takes more steps."""
    x = torch.linspace(-1, 1, 32, dtype=dtype).reshape(16, 2)
    return [x[:8] / 3, 3 * x[8:]]


def grads_of(net: nn.Module) -> list[Tensor]:
    grads: list[Any] = [p.grad for p in net.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Relative, over all of them: the gradient of a bias before a BatchNorm is zero."""
    x, y = (torch.cat([g.flatten() for g in gs]) for gs in (a, b))
    return float((x - y).norm() / y.norm())


def same_as_one_process(rank: int) -> None:
    counts = []
    for how in METHODS:
        alone = model(how)
        (sum(loss(alone, x) for x in parts()) / 2).backward()  # type: ignore[union-attr]
        data_parallel, sharded = DistributedDataParallel(model(how)), model(how)
        fully_shard(sharded)
        for net in (data_parallel, sharded):
            loss(net, parts()[rank]).backward()
            assert difference(grads_of(net), grads_of(alone)) < 1e-12, (how, type(net))
        counts.append(sharded[1].last_stats.n_steps)  # type: ignore[union-attr]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (alone, sharded)]
        for optimizer in optimizers:
            optimizer.step()
        after = [p.detach().full_tensor() for p in sharded.parameters()]  # type: ignore[attr-defined]
        assert difference(after, [p.detach() for p in alone.parameters()]) < 1e-12, how
    ours = torch.tensor(counts)
    others = ours.clone()
    dist.all_reduce(others)
    assert (others - ours)[1] != ours[1], "the adaptive solves should take different steps"


def in_training(rank: int) -> None:
    """BatchNorm and dropout in f, with and without autocast: MALI against ACA, which keeps its states."""
    single, double = torch.float32, torch.float64
    for cast, dtype, limit in ((False, double, 1e-12), (False, single, 1e-5), (True, single, 2e-2)):
        grads, statistics = [], []
        for gradient in (tm.ACA(), tm.MALI()):
            net = model({"controller": tm.FixedStep(0.1), "gradient": gradient}, True, dtype)
            parallel = DistributedDataParallel(net)
            torch.manual_seed(rank)
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                value = loss(parallel, parts(dtype)[rank])
            value.backward()
            grads.append(grads_of(parallel))
            statistics.append(copy.deepcopy(list(net.buffers())))
        assert difference(grads[1], grads[0]) < limit, (cast, dtype)
        assert all(map(torch.equal, *statistics))


def sharded_inside(rank: int) -> None:
    net = model(METHODS[0])
    fully_shard(net[1].func)  # type: ignore[arg-type]
    try:
        net(parts()[rank])
    except tm.InvalidFieldError as error:
        assert "fully_shard" in str(error)
    else:
        raise AssertionError("sharded parameters passed")


def synchronised(rank: int) -> None:
    """SyncBatchNorm itself runs on GPUs alone: what is refused is refused before it is called."""
    fixed, patient, steady = tm.FixedStep(0.1), tm.ALF(refresh="never"), tm.MALI(checkpoint_every=None)
    for solver, controller, gradient, remedies in [
        (tm.ALF(), fixed, steady, ['ALF() (use refresh="never"']),
        (patient, tm.AdaptiveStep(1e-3), steady, ["AdaptiveStep (use FixedStep(h))"]),
        (patient, fixed, tm.MALI(), ["MALI() (use MALI(checkpoint_every=None), or ACA())"]),
        (patient, fixed, tm.MALI(exact=True), ["MALI(exact=True) (use MALI(checkpoint_every=None)"]),
        (patient, fixed, tm.Adjoint(tm.Dopri5(), tm.AdaptiveStep(1e-4)), ["AdaptiveStep (use FixedStep(h))"]),
        (tm.ALF(), tm.AdaptiveStep(1e-3), tm.MALI(), ["FixedStep(h)", 'refresh="never"', "checkpoint_every=None"]),
        (patient, fixed, steady, []),
        (tm.ALF(refresh=5), fixed, tm.ACA(), []),
        (tm.RK4(), fixed, tm.Adjoint(), []),
    ]:
        net = model({"solver": solver, "controller": controller, "gradient": gradient}, True)
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        error: Any = None
        try:
            net(parts()[rank])
        except (tm.IncompatibleError, ValueError) as raised:
            error = raised
        if remedies:
            assert isinstance(error, tm.IncompatibleError) and all(text in str(error) for text in remedies), error
        else:
            assert not isinstance(error, tm.SolverError) and "to be on" in str(error), error
        net.eval()(parts()[rank])  # waits for nobody


def work(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        same_as_one_process(rank)
        in_training(rank)
        sharded_inside(rank)
        synchronised(rank)
    finally:
        dist.destroy_process_group()
