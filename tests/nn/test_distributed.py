"""Two processes give the gradient of one."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import distributed_worker
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes_give_the_gradient_of_one_on_the_joint_batch():
    """DistributedDataParallel and FSDP2, fixed and adaptive; BatchNorm, dropout and autocast in f. It asserts there."""
    mp.start_processes(distributed_worker.work, args=(free_port(),), nprocs=2, start_method="spawn")


def test_the_torchrun_example_trains_on_two_processes():
    run = "-m torch.distributed.run --standalone --nproc-per-node 2 -m examples.distributed --epochs 2"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, *run.split()], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "processes: 2, all with the same weights" in done.stdout
    assert float(re.findall(r"held-out ([\d.]+)%", done.stdout)[-1]) > 80  # of 10 classes
