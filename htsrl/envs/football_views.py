"""What an agent sees of a football match: minimap, vector, checkpoint rewards; and a picture for people.

Pure numpy, without the engine. ``state`` is always the dictionary that gfootball's core makes of one moment: teams
[players, 2], ball [3], who holds it, the agent's player, the game's mode.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

HEIGHT, WIDTH = 72, 96
LAYERS = 4
CHECKPOINTS = 10
CHECKPOINT_REWARD = 0.1

_PITCH = (38, 118, 60)
_COLOURS = ((66, 135, 245), (230, 70, 70), (255, 255, 255), (255, 214, 64))  # left, right, ball, active player
_ZOOM = 8


class View(Protocol):
    """A stack of the last observations in one array that is updated in place."""

    def fill(self, state: dict[str, Any]) -> np.ndarray: ...

    def push(self, state: dict[str, Any]) -> np.ndarray: ...

    def save(self) -> list:
        """What the stack holds, for JSON."""
        ...

    def load(self, saved: list) -> None:
        """The reverse of `save`."""
        ...


class Minimap:
    """gfootball's 'extracted': planes of left team, right team, ball and active player, 255 where somebody is.

    Only a few dozen of the 110,592 bytes are ever set, so the stack is moved by clearing and setting those.
    """

    def __init__(self, stack: int) -> None:
        self._planes = np.zeros((HEIGHT, WIDTH, LAYERS * stack), np.uint8)
        self._bytes = self._planes.reshape(-1)
        self._history: list[list[int]] = []
        self._stack = stack

    def fill(self, state: dict[str, Any]) -> np.ndarray:
        return self._show([self._marks(state)] * self._stack)

    def push(self, state: dict[str, Any]) -> np.ndarray:
        return self._show([*self._history[1:], self._marks(state)])

    def save(self) -> list:
        return self._history

    def load(self, saved: list) -> None:
        self._show(saved)

    def _show(self, history: list[list[int]]) -> np.ndarray:
        """Replaces the marks of the old history by those of the new, oldest first."""
        self._bytes[self._places()] = 0
        self._history = history
        self._bytes[self._places()] = 255
        return self._planes

    def _places(self) -> list[int]:
        return [mark + LAYERS * age for age, marks in enumerate(self._history) for mark in marks]

    def _marks(self, state: dict[str, Any]) -> list[int]:
        """Indices of the marked bytes of one observation, in the oldest place of the stack."""
        left = state["left_team"].tolist()
        marks = [self._index(x, y, 0) for x, y in left]
        marks += [self._index(x, y, 1) for x, y in state["right_team"].tolist()]
        ball_x, ball_y, _ = state["ball"].tolist()
        marks.append(self._index(ball_x, ball_y, 2))
        active = state["left_agent_controlled_player"][0]
        if active != -1:
            x, y = left[active]
            marks.append(self._index(x, y, 3))
        return marks

    def _index(self, x: float, y: float, layer: int) -> int:
        """Byte of the pixel under (x, y) in [-1, 1] x [-1 / 2.25, 1 / 2.25]; outside counts as the edge."""
        column = int((x + 1.0) / 2.0 * WIDTH)
        row = int((y + 1.0 / 2.25) / (2.0 / 2.25) * HEIGHT)
        column = max(0, min(WIDTH - 1, column))
        row = max(0, min(HEIGHT - 1, row))
        return (row * WIDTH + column) * LAYERS * self._stack + layer


class Simple115:
    """gfootball's 'simple115v2': positions and directions of both teams, ball, ownership, active player, game mode."""

    SIZE = 115

    def __init__(self, stack: int) -> None:
        self._values = np.zeros(self.SIZE * stack, np.float32)

    def fill(self, state: dict[str, Any]) -> np.ndarray:
        self._values.reshape(-1, self.SIZE)[:] = self._newest(state)
        return self._values

    def push(self, state: dict[str, Any]) -> np.ndarray:
        self._values[: -self.SIZE] = self._values[self.SIZE :]
        self._values[-self.SIZE :] = self._newest(state)
        return self._values

    def save(self) -> list:
        return self._values.tolist()

    def load(self, saved: list) -> None:
        self._values[:] = saved

    def _newest(self, state: dict[str, Any]) -> np.ndarray:
        values = np.zeros(self.SIZE, np.float32)
        for index, name in enumerate(("left_team", "left_team_direction", "right_team", "right_team_direction")):
            players = state[name].reshape(-1)
            values[22 * index : 22 * (index + 1)] = -1.0  # places of players that the scenario lacks
            values[22 * index : 22 * index + len(players)] = players
        values[88:91] = state["ball"]
        values[91:94] = state["ball_direction"]
        values[94 + state["ball_owned_team"] + 1] = 1.0
        active = state["left_agent_controlled_player"][0]
        if active != -1:
            values[97 + active] = 1.0
        values[108 + state["game_mode"]] = 1.0
        return values


def checkpoint_reward(reward: np.float32, state: dict[str, Any], collected: int) -> tuple[np.float32, int]:
    """0.1 for each of ten distances to the goal at which the agent first holds the ball (Kurach et al. 2020).

    Args:
      reward: 1 after a goal, -1 after one of the opponent's, else 0.
      state: the engine's observation after the step.
      collected: checkpoints that this episode has paid for.

    Returns:
      The reward with checkpoints in gfootball's float32 arithmetic, and the checkpoints collected now. A goal pays all
      that are left.
    """
    if reward == 1:
        return reward + np.float32(CHECKPOINT_REWARD * (CHECKPOINTS - collected)), CHECKPOINTS
    if state["ball_owned_team"] != 0 or state["ball_owned_player"] != state["left_agent_controlled_player"][0]:
        return reward, collected
    x, y, _ = state["ball"].tolist()
    distance = ((x - 1.0) ** 2 + y**2) ** 0.5
    while collected < CHECKPOINTS and distance <= 0.99 - 0.8 / (CHECKPOINTS - 1) * collected:
        reward = reward + np.float32(CHECKPOINT_REWARD)
        collected += 1
    return reward, collected


def picture(state: dict[str, Any]) -> np.ndarray:
    """The minimap for people: [HEIGHT * 8, WIDTH * 8, 3] uint8 RGB."""
    layers = Minimap(1).fill(state)
    pixels = np.full((HEIGHT, WIDTH, 3), _PITCH, np.uint8)
    for layer, colour in enumerate(_COLOURS):
        pixels[layers[..., layer] > 0] = colour
    return pixels.repeat(_ZOOM, axis=0).repeat(_ZOOM, axis=1)
