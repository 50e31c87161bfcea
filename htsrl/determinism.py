"""The one place where torch is told to compute the same bits every time, and where the switches are read back."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import torch


def enable() -> None:
    """Put torch into deterministic mode in this process, each kernel on one core.

    What several cores should share is split where it is known what belongs together, see htsrl.learner.gradient.

    Raises:
        RuntimeError: torch ignored a switch.
    """
    # cuBLAS reads this when its handle is made; without it, deterministic mode refuses matrix products on a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The same as use_deterministic_algorithms(True) without its import of torch's compiler, which nothing here uses: 70
    # MiB and a second for each process, and a folder that it leaves in $TMPDIR.
    torch.set_deterministic_debug_mode("error")
    # Deterministic mode would also fill every fresh tensor; nothing here reads memory that it did not write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    wanted = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cuDNN without autotuning": not torch.backends.cudnn.benchmark,
        "deterministic cuDNN": torch.backends.cudnn.deterministic,
        "full float32 products": not (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32),
        "one thread per kernel": torch.get_num_threads() == 1,
    }
    ignored = [name for name, on in wanted.items() if not on]
    if ignored:
        raise RuntimeError(f"torch ignored these switches: {', '.join(ignored)}; the run would not be reproducible")


def fingerprint(threads: int, device: str) -> dict[str, str | int]:
    """What a run's bits depend on beside configuration and seed."""
    return {
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "learner_threads": threads,
    }
