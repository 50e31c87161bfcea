"""Streaming mean and variance, exact however the rows arrive: what observations and rewards are normalised with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EPSILON = 1e-4
"""Added to variances: a feature that hardly moves is not blown up to noise (Hafner et al. 2017, in their code)."""


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of all rows so far: float64, since float32 stands still at 10⁷ rows.

    What it holds is a function of the batches and their order alone, and a batch is all transitions of one interval, in
    (step, replica) order: so it doesn't depend on which process made a row.
    """

    count: float
    mean: np.ndarray
    """[D]"""
    m2: np.ndarray
    """[D]: Σ (x - mean)²"""

    @classmethod
    def empty(cls, size: int) -> Moments:
        """Of no rows yet."""
        return cls(0.0, np.zeros(size), np.zeros(size))

    def add(self, rows: np.ndarray) -> None:
        """Take in ``rows`` [R, D] (Chan, Golub and LeVeque 1979, equation 2.1)."""
        if not len(rows):
            return
        x = rows.astype(np.float64)
        mean = x.mean(0)
        m2 = np.square(x - mean).sum(0)
        total = self.count + len(x)
        apart = mean - self.mean
        self.mean = self.mean + apart * (len(x) / total)
        self.m2 = self.m2 + m2 + np.square(apart) * (self.count * len(x) / total)
        self.count = total

    @property
    def variance(self) -> np.ndarray:
        """[D]; zeros before the first row."""
        return self.m2 / max(self.count, 1.0)

    def centre_and_scale(self) -> tuple[np.ndarray, np.ndarray]:
        """``(mean, scale)`` [D] float32: (x - mean) · scale has mean 0 and deviation 1. Before two rows, 0 and 1."""
        if self.count < 2:
            return np.zeros_like(self.mean, np.float32), np.ones_like(self.mean, np.float32)
        return self.mean.astype(np.float32), (1.0 / np.sqrt(self.variance + EPSILON)).astype(np.float32)

    def root_mean_square(self) -> np.ndarray:
        """[D]: √E[x²], how large x is where it is not centred; 0 before the first row."""
        return np.sqrt(np.square(self.mean) + self.variance)

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything, by name, for a checkpoint."""
        return {"count": np.array(self.count), "mean": self.mean.copy(), "m2": self.m2.copy()}

    @classmethod
    def loaded(cls, arrays: dict[str, np.ndarray], size: int) -> Moments:
        """From what :meth:`arrays` returned; ValueError where that is not of ``size`` numbers, or impossible."""
        shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        f64 = np.dtype(np.float64)
        if shapes != {"count": (f64, ()), "mean": (f64, (size,)), "m2": (f64, (size,))}:
            raise ValueError(f"these are no statistics of {size} numbers: {shapes}")
        count, mean, m2 = float(arrays["count"]), arrays["mean"], arrays["m2"]
        if not (count >= 0 and np.isfinite([count, *mean, *m2]).all() and (m2 >= 0).all()):
            raise ValueError("statistics hold a negative count or variance, NaN or infinity")
        return cls(count, mean.copy(), m2.copy())
