"""Where the labels of a picture stand: beside their marks, hiding nothing; far ones have a line to their mark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.path import Path as Line
from matplotlib.transforms import Bbox

# Where a label may stand, in points from its mark: the nearer ones first.
SPOTS = [
    (round(far * math.cos(turn)), round(far * math.sin(turn)))
    for far in (8, 14, 22, 32, 44, 56, 68, 80)
    for turn in map(math.radians, (0, 180, 35, 145, -35, -145, 65, 115, -65, -115, 15, 165, -15, -165, 80, -80))
]
LED = 12  # points: a label further from its mark has a line to it
MARK = 5  # pixels from the middle of a mark to its sides, with some room
HIDDEN = 10  # how much worse a hidden label is than a mark with a line through it
ROUNDS = 6  # of placing all labels in one order


def is_led(dx: int, dy: int) -> bool:
    """Whether a label so far away has a line to its mark."""
    return math.hypot(dx, dy) > LED


def alignment(dx: int, dy: int) -> tuple[str, str]:
    """Which side of the label is so many points from its mark, across and upwards."""
    up = "center" if abs(dy) < abs(dx) else "bottom" if dy > 0 else "top"
    return "left" if dx > 0 else "right", up


def around(x: float, y: float, across: float, up: float | None = None) -> Bbox:
    """A box that reaches so many pixels from its middle, upwards as far as across where nothing is said."""
    up = across if up is None else up
    return Bbox.from_extents(x - across, y - up, x + across, y + up)


@dataclass(frozen=True)
class Spot:
    """A place for a label, so many points from its mark: the words' box and the line between, in pixels."""

    dx: int
    dy: int
    box: Bbox
    line: Line | None

    def hinders(self, other: Spot) -> int:
        """In how many ways the two labels are in each other's way."""
        return int(self.box.overlaps(other.box)) + self._crosses(other.box) + other._crosses(self.box)

    def marks_crossed(self, marks: Iterable[Bbox]) -> int:
        """How many of these marks its line goes through."""
        return sum(map(self._crosses, marks))

    def _crosses(self, box: Bbox) -> bool:
        return self.line is not None and bool(self.line.intersects_bbox(box, filled=False))


def places(
    marks: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    all_marks: Iterable[tuple[float, float]],
    taken: Sequence[Bbox],
    inside: Bbox,
    pixels: float,
) -> list[tuple[int, int]]:
    """The points (dx, dy) from its mark for each label, given the mark's middle and the words' width and height.

    `all_marks` are those that a line should not go through, `taken` is what no label may lie on, and all labels stay
    `inside`: all in pixels, of which a point has so many.
    """
    every = [(mark, around(*mark, MARK)) for mark in all_marks]
    spots = [_spots(mark, size, pixels) for mark, size in zip(marks, sizes, strict=True)]
    fixed = []
    for mark, mine in zip(marks, spots, strict=True):
        others = [box for middle, box in every if math.dist(mark, middle) > 2 * MARK]
        hidden = _hidden(mine, taken, inside)
        fixed.append([HIDDEN * h + spot.marks_crossed(others) for spot, h in zip(mine, hidden, strict=True)])
    numbers = range(len(marks))
    orders = [sorted(numbers, key=lambda i: (sign * marks[i][way], i)) for way in (1, 0) for sign in (-1, 1)]
    best: list[Spot] = []
    least = math.inf
    for order in orders:
        cost, placed = _placed(spots, fixed, order)
        if cost < least:
            best, least = placed, cost
        if not least:
            break
    return [(spot.dx, spot.dy) for spot in best]


def _placed(
    spots: Sequence[Sequence[Spot]], fixed: Sequence[Sequence[int]], order: Sequence[int]
) -> tuple[float, list[Spot]]:
    """Each label in turn where it costs least beside those that stand; later rounds move what is in others' way."""
    placed: dict[int, Spot] = {}
    costs: dict[int, float] = {}
    for _ in range(ROUNDS):
        for number in order:
            others = [spot for other, spot in placed.items() if other != number]
            costs[number] = math.inf
            for spot, cost in zip(spots[number], fixed[number], strict=True):
                if cost < costs[number]:
                    cost += HIDDEN * sum(map(spot.hinders, others))
                if cost < costs[number]:
                    placed[number], costs[number] = spot, cost
                if not cost:
                    break
        if not any(costs.values()):
            break
    return sum(costs.values()), [placed[number] for number in range(len(spots))]


def _spots(mark: tuple[float, float], size: tuple[float, float], pixels: float) -> list[Spot]:
    """Where a label of that size may stand."""
    spots = []
    for dx, dy in SPOTS:
        across, up = alignment(dx, dy)
        left = mark[0] + dx * pixels - (0 if across == "left" else size[0])
        low = mark[1] + dy * pixels - size[1] * {"bottom": 0.0, "center": 0.5, "top": 1.0}[up]
        box = Bbox.from_bounds(left, low, *size)
        middle = (left + size[0] / 2, low + size[1] / 2)
        spots.append(Spot(dx, dy, box, Line([mark, middle]) if is_led(dx, dy) else None))
    return spots


def _hidden(spots: Sequence[Spot], taken: Sequence[Bbox], inside: Bbox) -> list[int]:
    """How many things a label at each spot would hide; very many where it is not inside."""
    left, low, right, high = np.array([spot.box.extents for spot in spots]).T
    out = (left < inside.x0) | (right > inside.x1) | (low < inside.y0) | (high > inside.y1)
    x0, y0, x1, y1 = np.array([box.extents for box in taken]).T[:, :, None]
    hidden = (left <= x1) & (x0 <= right) & (low <= y1) & (y0 <= high)
    counts: list[int] = (1000 * out + hidden.sum(0)).tolist()
    return counts
