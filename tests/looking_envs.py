"""An environment that looks around in the process that steps it."""

import sys

import gymnasium
import numpy as np


class ReportsTorch(gymnasium.Env):
    """Observes 1 where torch is loaded beside it, else 0."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return self.look(), {}

    def step(self, action):
        return self.look(), 0.0, False, False, {}

    def look(self):
        # The description is made in the run's own process, where torch belongs
        return np.array(["torch" in sys.modules], np.float32)


gymnasium.register("ReportsTorch-v0", ReportsTorch)
