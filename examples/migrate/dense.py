"""The job of the tf_distribute scripts, in NumPy alone: digits as rows of 64 numbers, and the first weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_digits

Arrays = tuple[Any, Any]


def digits(dtype: str) -> tuple[Arrays, Arrays]:
    """Training set (1,500 images and labels) and test set (297)."""
    source = load_digits()
    order = np.random.default_rng(0).permutation(len(source.target))
    images, labels = (source.data / 16).astype(dtype)[order], source.target[order]
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def first_weights(dtype: str) -> list[Any]:
    """Of two layers: kernel (64, 32), bias, kernel (32, 10), bias, as Keras has them; torch's are transposed."""
    draw = np.random.default_rng(1)
    return [draw.normal(0, n**-0.5, (n, m)).astype(dtype) if n else np.zeros(m, dtype)
            for n, m in ((64, 32), (0, 32), (32, 10), (0, 10))]  # fmt: skip
