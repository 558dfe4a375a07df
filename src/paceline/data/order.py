"""The order of the examples in an epoch: a function of (length, seed, loader, epoch), in constant memory.

Up to WHOLE examples, the order is a shuffled list. For more examples, no list is kept: a keyed permutation computes the
example at a position. So an epoch of 10^10 examples starts at once, and also resumes at once in mid-epoch. The
permutation is a Feistel network on pairs of numbers (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA
2002, section 5) with splitmix64's finalizer as its round function. A result outside the range is permuted again until
it is inside ("cycle walking", section 4 of that paper).
"""

from __future__ import annotations

import math

import numpy as np

from paceline.data.randomness import mix, permutation, tag

WHOLE = 1 << 16
"""The largest number of examples that are shuffled as a list (of 512 KiB)."""

VERSION = 2
"""Version of the order, stored in checkpoints. Version 1 shuffled any number of examples as a list."""

_BLOCK = 4096  # positions computed at once: their arrays stay in the L1 cache
_ROUNDS = 8
_HALF = np.uint64(32)


def order_of(length: int, seed: int, name: str, epoch: int, version: int = VERSION) -> np.ndarray | KeyedOrder:
    """The shuffled order of an epoch of the loader `name`, the same for any number of processes. Slices of the order
    are (n,) int64."""
    if version == 1 or length <= WHOLE:
        return permutation(length, seed, name, epoch)
    return KeyedOrder(length, mix(seed, tag("order"), tag(name), epoch))


class KeyedOrder:
    """A permutation of range(length), computed when a slice (of step 1) is read.

    Args:
        length: at most 2**62.
        key: 64 bits. Different keys give different permutations.
    """

    def __init__(self, length: int, key: int) -> None:
        self._length = length
        # A position is a pair (left, right) with the value left * self._right + right. There are a few more pairs than
        # positions.
        self._left = math.isqrt(length - 1) + 1 if length else 1
        self._right = -(-length // self._left)
        self._keys = [np.uint64(mix(key, number)) for number in range(_ROUNDS)]
        self._first = -1  # first position of the block that was computed last
        self._block = np.empty(0, np.int64)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, positions: slice) -> np.ndarray:
        """The examples at these positions: (n,) int64."""
        start, stop, _ = positions.indices(self._length)
        parts = []
        while start < stop:
            first = start - start % _BLOCK
            until = min(stop, first + _BLOCK)
            parts.append(self._from(first)[start - first : until - first])
            start = until
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def _from(self, first: int) -> np.ndarray:
        """The examples of a block of positions. Keeps the latest block: global batches are small and read in order."""
        if first != self._first:
            positions = np.arange(first, min(first + _BLOCK, self._length), dtype=np.uint64)
            self._first, self._block = first, self._walk(positions).astype(np.int64)
        return self._block

    def _walk(self, positions: np.ndarray) -> np.ndarray:
        """Apply the permutation of the pairs until each result is below the length. Returns (n,) uint64."""
        found = self._permuted(positions)
        while (outside := np.flatnonzero(found >= self._length)).size:
            found[outside] = self._permuted(found[outside])
        return found

    def _permuted(self, positions: np.ndarray) -> np.ndarray:
        """Apply the permutation of the pairs once. Returns (n,) uint64."""
        sizes = np.uint64(self._left), np.uint64(self._right)
        halves = [positions // sizes[1], positions % sizes[1]]
        for number, key in enumerate(self._keys):
            changed, other = number % 2, 1 - number % 2
            moved = halves[changed] + _number_below(sizes[changed], halves[other], key)
            halves[changed] = np.minimum(moved, moved - sizes[changed])  # modulo: values below 0 wrap to the top
        return halves[0] * sizes[1] + halves[1]


def _number_below(size: np.uint64, words: np.ndarray, key: np.uint64) -> np.ndarray:
    """Hash each word with the key to a number below `size`. size: at most 2**31."""
    with np.errstate(over="ignore"):
        state = words ^ key
        state ^= state >> np.uint64(30)
        state *= np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(27)
        state *= np.uint64(0x94D049BB133111EB)
        state >>= _HALF  # the upper half: multiplication mixes it best
        state *= size
        state >>= _HALF
        return state
