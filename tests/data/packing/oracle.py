"""Plain best-fit-decreasing, one sample at a time."""

from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], row_width: int) -> list[list[int]]:
    """Returns the lengths in each row; among equally full rows the last changed one takes the sample."""
    rows: list[list[int]] = []
    changed: list[int] = []  # numbers of rows, the last changed one at the end
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in reversed(changed) if sum(rows[row]) + length <= row_width]
        if fitting:
            # max takes the first of equals, which is the last changed one
            chosen = max(fitting, key=lambda row: sum(rows[row]))
            changed.remove(chosen)
        else:
            chosen = len(rows)
            rows.append([])
        rows[chosen].append(length)
        changed.append(chosen)
    return rows
