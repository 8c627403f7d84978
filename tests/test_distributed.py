"""Two processes give the gradient of one."""

import socket

import distributed_worker
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes_give_the_gradient_of_one_on_the_joint_batch():
    """DistributedDataParallel and FSDP2, fixed and adaptive; BatchNorm, dropout and autocast in f. It asserts there."""
    mp.start_processes(distributed_worker.work, args=(free_port(),), nprocs=2, start_method="spawn")
