"""A keyed random bijection of [0, n) in constant memory: shuffled epochs without a shuffled list.

A balanced Feistel network over the smallest even number of bits that holds n, with cycle walking for values outside
(Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). The arithmetic is fixed here, so that the order of a
run does not depend on the version of a random number library.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

ROUNDS = 6
BLOCK = 1024  # indices computed together, because numpy is slow for single values


class Permutation:
    """``permutation[i]`` for i in [0, n): every value of [0, n) exactly once, in an order set by ``key``.

    >>> [[Permutation(6, key)[i] for i in range(6)] for key in ("epoch 0", "epoch 1")]
    [[5, 0, 4, 3, 2, 1], [2, 5, 4, 3, 0, 1]]
    """

    def __init__(self, n: int, key: str) -> None:
        assert n > 0
        self.n = n
        self._half_bits = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8")
        self._block_index = -1
        self._block: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.n
        block, offset = divmod(index, BLOCK)
        if block != self._block_index:
            self._block = self.values_at(np.arange(block * BLOCK, min(self.n, (block + 1) * BLOCK), dtype=np.uint64))
            self._block_index = block
        return int(self._block[offset])

    def values_at(self, indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The values at many indices, [N] → [N]."""
        values = self._encrypt(indices)
        while (outside := values >= self.n).any():
            values[outside] = self._encrypt(values[outside])
        return values

    def indices_of(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The indices of values, [N] → [N]: the inverse of ``values_at``.

        >>> order = Permutation(6, "epoch 0")
        >>> order.indices_of(order.values_at(np.arange(6, dtype=np.uint64))).tolist()
        [0, 1, 2, 3, 4, 5]
        """
        places = self._decrypt(values)
        while (outside := places >= self.n).any():
            places[outside] = self._decrypt(places[outside])
        return places

    def _encrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        mask = (np.uint64(1) << self._half_bits) - np.uint64(1)
        left, right = values >> self._half_bits, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << self._half_bits) | right

    def _decrypt(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        mask = (np.uint64(1) << self._half_bits) - np.uint64(1)
        left, right = values >> self._half_bits, values & mask
        for key in self._keys[::-1]:
            left, right = right ^ (_mix(left ^ key) & mask), left
        return (left << self._half_bits) | right


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser (Steele et al. 2014): every input bit moves every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
