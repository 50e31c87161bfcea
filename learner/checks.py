"""Shapes that are asserted stay true: ``check`` is the first lines of the pure functions of this package."""

from __future__ import annotations

from typing import Any


def check(sizes: dict[str, int], shape: str, dtype: Any, *arrays: Any) -> None:
    """Assert the shape and dtype of numpy arrays or tensors; off under ``python -O``.

    ``shape`` is written in the letters of the package, ``"T N"`` or ``"T+1 N"``; ``sizes`` collects what each letter
    stands for, so that all checks of one function must agree.
    """
    if not __debug__:
        return
    for array in arrays:
        assert array.dtype == dtype, f"expected {dtype}, got {array.dtype}"
        axes = shape.split()
        assert len(axes) == len(array.shape), f"expected [{shape}], got {tuple(array.shape)}"
        for axis, size in zip(axes, array.shape, strict=True):
            letter, _, more = axis.partition("+")
            size -= int(more or 0)
            assert sizes.setdefault(letter, size) == size, f"expected [{shape}] with {sizes}, got {tuple(array.shape)}"
