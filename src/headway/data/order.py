"""The shuffled order of training rows: a pure function of the step number, so that a run resumes without stored state.

A Feistel network over 2b-bit numbers is a permutation whatever its round function is; numbers outside [0, n) are
permuted again until they fall inside ("cycle walking", Black and Rogaway 2002), which gives a permutation of [0, n).
Nothing is stored: a corpus of any size is shuffled in constant memory, and any index is computed directly.
"""

from headway.errors import DataError

_ROUNDS = 8
_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """Mixes 64 bits by splitmix64's finaliser: each bit depends on all (Steele, Lea, Flood 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def keyed(*words: int) -> int:
    """Returns 64 well-mixed bits that depend on all `words` and their order, as a seed."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = _mix((state + (word & _MASK) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & _MASK)
    return state


class Permutation:
    """A random permutation of range(size) that depends on (seed, epoch): `permutation(i)` is the i-th row to read in
    the epoch."""

    def __init__(self, seed: int, epoch: int, size: int) -> None:
        if size < 1 or epoch < 0:
            raise DataError(f"permutation: size must be 1 or more, epoch 0 or more; got {size} and {epoch}")
        self.size = size
        self._keys = [keyed(seed, epoch, r) for r in range(_ROUNDS)]
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)

    def __call__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise DataError(f"permutation: index {index} is outside the epoch's {self.size} rows")
        half, low = self._half, (1 << self._half) - 1
        x = index  # size 5 has half = 2 bits, so that x lies in [0, 16); results from 5 on are permuted again
        while True:
            left, right = x >> half, x & low
            for key in self._keys:
                left, right = right, left ^ (_mix(key ^ right) & low)
            x = (left << half) | right
            if x < self.size:
                return x


def rows_from(seed: int, first: int, count: int, size: int) -> list[int]:
    """Returns the `count` rows that a run over a corpus of `size` rows reads from its row number `first` on.

    Each row is read once per epoch; the last rows of an epoch are followed by the first of the next."""
    rows: list[int] = []
    while len(rows) < count:
        epoch, index = divmod(first + len(rows), size)
        permutation = Permutation(seed, epoch, size)
        rows += map(permutation, range(index, min(size, index + count - len(rows))))
    return rows
