"""Coordinates of gathered slices in the place of groups, for stages on workers.

A function of one coordinate (`drjax.reduce_columns`) is the local stage of a plan whose
groups are the coordinates: workers compute blocks of coordinates, each with the numbers
of all groups of the program.

Input: the arrays of a loop of the op `columns`. Output: for its body arrays with the
coordinates along axis 0, and the reverse.

Invariants: coordinates are in their flat order, and no number is copied here.
"""

from typing import Any

import numpy as np

from drjax.plan import Value


def by_coordinate(value: Value, x: Any, size: int) -> Any:
    """Return an input of a `columns` loop as its body takes it.

    Args:
      value: The input of the body.
      x: The array of the input of the loop: `[n, *s, *t]` or `[*s, *t]` for coordinates
        of the shape `s`, or `[*t]`.
      size: d, the number of coordinates.

    Returns:
      A view `[d, n, *t]` or `[d, *t]`; `x` itself if all coordinates share it.
    """
    if not value.partitioned:
        return x
    return np.moveaxis(np.reshape(x, value.whole_shape(size)), value.axis, 0)


def whole_of_coordinates(value: Value, result: Value, x: Any) -> np.ndarray:
    """Return an output of the body of a `columns` loop as an output of the loop.

    Args:
      value: The output of the body.
      result: The output of the loop.
      x: The array of the output of the body: `[d, n, *t]` or `[d, *t]`, or a sum over
        the coordinates.

    Returns:
      `[n, *s, *t]` or `[*s, *t]` for coordinates of the shape `s`; or the sum.
    """
    if not value.partitioned:
        return x
    return np.reshape(np.moveaxis(x, 0, value.axis), result.shape)
