"""How many programs share the rows of a part: of a sample, or of a group of columns, backward."""

from __future__ import annotations

# Each wave starts anew, and each program leaves sums, which takes a program about as long as so many rows.
_MOST_WAVES = 4
_START = 4


def programs_a_part(most: int, parts: int, tiles: int) -> int:
    """Return how many programs share the tiles of a part.

    The programs that the GPU runs at once make a wave, and what counts is how many tiles waves take in turn. One
    program more than a wave's is another wave: with 17 programs for each of 32 samples where 528 run, 16 wait until all
    others have ended.

    Args:
        most: programs that run at once.
        parts: how many parts there are, of as many tiles each.
        tiles: tiles of a part.

    Returns:
        The number with which waves take the fewest tiles in turn, the smallest of such numbers.
    """

    def taken(each: int) -> tuple[int, int]:
        return -(-parts * each // most) * (-(-tiles // each) + _START), each

    # As many as fit into each number of waves, less those without which none takes more tiles.
    most_of_each = [max(1, min(waves * most // parts, tiles)) for waves in range(1, _MOST_WAVES + 1)]
    return min((-(-tiles // -(-tiles // each)) for each in most_of_each), key=taken)
