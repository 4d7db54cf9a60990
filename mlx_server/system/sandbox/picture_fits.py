"""The sizes in which a model is shown pictures of a size."""

import math

import msgspec

Size = tuple[int, int]
"""Width and height."""

Resizes = list[list[Size]]
"""How the views of a picture are made: each by resizing it, once or several times."""


class Square(msgspec.Struct, frozen=True, tag=True):
    """Each picture is made a square of the same size."""

    side: int

    def resizes(self, width: int, height: int) -> Resizes:
        return [[(self.side, self.side)]]


class LongestSide(msgspec.Struct, frozen=True, tag=True):
    """Each picture keeps its aspect and is made no larger; its sides become multiples of `cell`."""

    cell: int
    longest: int

    def resizes(self, width: int, height: int) -> Resizes:
        ratio = max(width, height) / self.longest
        if ratio > 1:
            width, height = (max(1, math.floor(side / ratio)) for side in (width, height))
        return [[(-(-width // self.cell) * self.cell, -(-height // self.cell) * self.cell)]]


class Grid(msgspec.Struct, frozen=True, tag=True):
    """Each picture keeps its aspect, and its sides become multiples of `cell`."""

    cell: int
    least: int
    """The least number of pixels, as far as multiples allow; so is `most`."""
    most: int

    def resizes(self, width: int, height: int) -> Resizes:
        cell = self.cell
        wide, high = round(width / cell) * cell, round(height / cell) * cell
        if wide * high > self.most:
            times = math.sqrt(width * height / self.most)
            wide, high = (max(1, int(side / times / cell)) * cell for side in (width, height))
        elif wide * high < self.least:
            times = math.sqrt(self.least / (width * height))
            wide, high = (math.ceil(side * times / cell) * cell for side in (width, height))
        return [[(wide, high)]]


Fit = Square | LongestSide | Grid
"""The sizes that a picture has for a model, by the size of its file."""
