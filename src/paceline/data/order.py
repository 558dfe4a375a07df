"""The order of the examples in an epoch: a function of (length, seed, loader, epoch), in constant memory.

Up to WHOLE examples it is a list of all of them, shuffled. Beyond, no list is kept: a keyed permutation says which
example comes at a place, so that an epoch of 10^10 examples begins, and is resumed in its middle, at once. It is a
Feistel network on pairs of numbers (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, section 5)
with splitmix64's finalizer for its round function; a place that leads out of the range is led on until it is in it
("cycle walking", section 4 there).
"""

from __future__ import annotations

import math

import numpy as np

from paceline.data.randomness import mix, permutation, tag

WHOLE = 1 << 16
"""So many examples are shuffled as a list (of 512 KiB)."""

VERSION = 2
"""Of the order; in checkpoints. In version 1 any number of examples was shuffled as a list."""

_BLOCK = 4096  # places that are computed at once: their arrays stay in the first cache
_ROUNDS = 8
_HALF = np.uint64(32)


def order_of(length: int, seed: int, name: str, epoch: int, version: int = VERSION) -> np.ndarray | KeyedOrder:
    """The shuffled order of an epoch of the loader `name`. Its slices are (n,) int64, the same in every world."""
    if version == 1 or length <= WHOLE:
        return permutation(length, seed, name, epoch)
    return KeyedOrder(length, mix(seed, tag("order"), tag(name), epoch))


class KeyedOrder:
    """A permutation of range(length), computed where it is looked at: by slices of step 1.

    Args:
        length: at most 2**62.
        key: of 64 bits. Another key is another permutation.
    """

    def __init__(self, length: int, key: int) -> None:
        self._length = length
        # A place is the pair (left, right), left * self._right + right, of which there are a few more than places.
        self._left = math.isqrt(length - 1) + 1 if length else 1
        self._right = -(-length // self._left)
        self._keys = [np.uint64(mix(key, number)) for number in range(_ROUNDS)]
        self._first = -1  # of the block that was computed last
        self._block = np.empty(0, np.int64)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> np.ndarray:
        """The examples at these places: (n,) int64."""
        start, stop, _ = places.indices(self._length)
        parts = []
        while start < stop:
            first = start - start % _BLOCK
            until = min(stop, first + _BLOCK)
            parts.append(self._from(first)[start - first : until - first])
            start = until
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def _from(self, first: int) -> np.ndarray:
        """The examples at a block of places. The latest block is kept: global batches are small, and come in order."""
        if first != self._first:
            places = np.arange(first, min(first + _BLOCK, self._length), dtype=np.uint64)
            self._first, self._block = first, self._walk(places).astype(np.int64)
        return self._block

    def _walk(self, places: np.ndarray) -> np.ndarray:
        """(n,) uint64, each below the length: the permutation of the pairs, until it is in range."""
        found = self._permuted(places)
        while (outside := np.flatnonzero(found >= self._length)).size:
            found[outside] = self._permuted(found[outside])
        return found

    def _permuted(self, places: np.ndarray) -> np.ndarray:
        """A permutation of the pairs, as (n,) uint64."""
        sizes = np.uint64(self._left), np.uint64(self._right)
        halves = [places // sizes[1], places % sizes[1]]
        for number, key in enumerate(self._keys):
            changed, other = number % 2, 1 - number % 2
            moved = halves[changed] + _number_below(sizes[changed], halves[other], key)
            halves[changed] = np.minimum(moved, moved - sizes[changed])  # modulo: what is below 0 wraps to the top
        return halves[0] * sizes[1] + halves[1]


def _number_below(size: np.uint64, words: np.ndarray, key: np.uint64) -> np.ndarray:
    """For each word a number below `size` (at most 2**31), that the key makes of it."""
    with np.errstate(over="ignore"):
        state = words ^ key
        state ^= state >> np.uint64(30)
        state *= np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(27)
        state *= np.uint64(0x94D049BB133111EB)
        state >>= _HALF  # the upper half, which the multiplications have mixed best
        state *= size
        state >>= _HALF
        return state
