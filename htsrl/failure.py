"""What a run leaves behind when a loss or its gradient is not finite: the folder ``failure`` in its own.

``update.safetensors`` holds the arrays, ``update.json`` says of which interval, epoch and minibatch they are:

    from safetensors.numpy import load_file
    failure = load_file("RUN_DIR/failure/update.safetensors")
    failure["minibatch/obs"], failure["minibatch/advantage"], failure["records"][-1]

- ``minibatch/*`` [M, ...]: the rows as the step saw them, and where they stood: step ``t`` of the interval, replica
  ``n`` (under schedule 'async', column ``n`` of the batch). Those of ``weight`` 0 only fill up. A recurrent policy's
  rows are T * C, in (step, replica) order; ``state`` [C, S] is before the first step, and ``begins`` [T, C] says where
  an episode does.
- ``parameters/*``, ``algorithm/*``, ``gradient/*``: parameters and optimizer before the step, and the gradient before
  clipping. They are left out where steps were made before anybody looked: ``stepped`` in ``update.json``.
- ``behaviour/*``: the parameters at which the update began, which collected the rows (but under schedule 'async' and
  with delay 'importance').
- ``records`` [steps, terms]: loss terms and gradient norms of every step of the update up to this one.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from htsrl.errors import NonFinite, RunFailed
from htsrl.rundir import FAILURE, plain, write_atomically


def save_failure(run_dir: Path, failure: NonFinite) -> RunFailed:
    """Write what ``failure`` carries into the folder of its run; returns what to tell the user."""
    progress, interval = failure.numbers["progress"], failure.numbers["interval"]
    message = (
        f"{failure}, in interval {interval}, after {progress:.2%} of the run: look for NaN or huge numbers in the "
        f"environment's observations and rewards, and try a lower learning rate (htsrl resume {run_dir} --fork "
        "--learning-rate ...)"
    )
    folder = run_dir / FAILURE
    about = {"message": str(failure), **failure.numbers, "arrays": sorted(failure.tensors)}
    try:
        folder.mkdir(exist_ok=True)
        arrays = {name: np.require(array, requirements="C") for name, array in failure.tensors.items()}
        write_atomically(folder / "update.safetensors", save(arrays))
        write_atomically(folder / "update.json", (json.dumps(plain(about), indent=2) + "\n").encode())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return RunFailed(f"{message}; what there was to look at could not be written to {folder}: {reason}")
    return RunFailed(
        f"{message}; the rows, parameters and gradient are in {folder / 'update.safetensors'}: look at them with "
        "safetensors.numpy.load_file"
    )
