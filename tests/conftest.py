"""Tests compute with one thread, like the learner of a small network: two would fight with the runs' own processes."""

import torch

torch.set_num_threads(1)
