"""A module that can be imported by the run, but not by its children."""

import multiprocessing

if multiprocessing.parent_process() is not None:
    raise ModuleNotFoundError("No module named 'robots'")

from faulty_envs import Steady as Steady
from faulty_nets import linear as linear
