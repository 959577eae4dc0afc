"""The process environment: ranks from whichever launcher, backend, device, DeepSpeed's start-up quirks."""

import logging
import os
import sys
import warnings
from datetime import timedelta

from omni_ds.errors import UserError
from omni_ds.plan.hardware import Device

# How long a rank waits for the others before it gives up and says so.
TIMEOUT = timedelta(minutes=float(os.environ.get("OMNI_DS_TIMEOUT_MINUTES", "30")))


def rank() -> int:
    """Global rank from the launcher's environment (deepspeed, torchrun, srun), 0 without one."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def is_rank_0() -> bool:
    return rank() == 0


def _adopt_slurm() -> None:
    """Set the variables torch expects from srun's, when only those are there."""
    if (
        "RANK" in os.environ
        or "SLURM_PROCID" not in os.environ
        or int(os.environ.get("SLURM_NTASKS", "1")) < 2
    ):
        return
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    os.environ["LOCAL_RANK"] = os.environ.get("SLURM_LOCALID", "0")
    nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_NODELIST", "localhost"))
    os.environ.setdefault("MASTER_ADDR", _first_node(nodes))
    os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 10000))


def _first_node(nodes: str) -> str:
    """First host of a Slurm node list: ``gpu[03-05,9],x`` -> ``gpu03``."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]


def start_distributed() -> None:
    """Join the world: NCCL on CUDA, gloo on CPU. A process without a launcher is a world of one."""
    import torch

    _adopt_slurm()
    _keep_memory_whole()
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", _threads_per_rank())))
    prepare_imports()
    import deepspeed

    # Its shared-memory op is compiled on first use and is of no use to us.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    # Not by DeepSpeed: it would bind the group to a device, and NCCL would then run all point-to-point
    # messages of a group one after another, whatever their peers (parallel/groups.py relies on one
    # communicator for each pair).
    try:
        torch.distributed.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
        deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", timeout=TIMEOUT, verbose=False)
    except torch.distributed.DistNetworkError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" not in str(error):
            raise UserError(f"the ranks cannot meet at {where}: {str(error).splitlines()[0]}") from None
        raise UserError(
            f"{where} is in use by another program; choose another port: deepspeed --master_port N, "
            "torchrun --master_port N"
        ) from None


def found_device() -> Device:
    """What this process runs on."""
    import torch

    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
    if not torch.cuda.is_available():
        return Device(on_node=local)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(properties.name, properties.total_memory, local)


def smallest_device() -> Device:
    """That of the rank with least memory, the same on every rank; collective over the world."""
    import torch.distributed as dist

    devices: list[Device] = [Device()] * dist.get_world_size()
    dist.all_gather_object(devices, found_device())
    return min(devices, key=lambda d: (d.memory or 0, d.name, d.on_node))


def _keep_memory_whole() -> None:
    """Segments of torch's allocator on CUDA grow instead of lying beside each other, unless the user has
    chosen: micro-batches of ever other lengths leave gaps between them (9.6 of 141 GiB where measured)."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def prepare_imports() -> None:
    """To be called before DeepSpeed is imported: choose its accelerator, and keep it and HF quiet.

    What matters to a user is printed by us; their warnings still come through.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls collectives by names that torch 2.13 has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def _threads_per_rank() -> int:
    local = int(
        os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", os.environ.get("WORLD_SIZE", "1")))
    )
    return max(1, (os.cpu_count() or 1) // local)


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def stop_distributed() -> None:
    """Leave the world in order; without it some ranks abort when the process ends."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier(device_ids=[torch.cuda.current_device()] if torch.cuda.is_available() else None)
        dist.destroy_process_group()
