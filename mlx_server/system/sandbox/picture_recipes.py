"""How models are shown pictures: in which sizes, and as how many tokens.

A recipe is made from a checkpoint's files, and sent to the process that decodes pictures, which
knows their size first.
"""

import math
from collections.abc import Sequence
from typing import Self

import msgspec
from msgspec.structs import replace

MOST_LONGER = 100
"""How many times the longer side of a picture may be the shorter one, if most of it is cut off."""

MOST_FRAMED = 3000
"""The most pixels of the side of a square in whose middle a picture is put."""

MOST_PATCHES = 512
"""Of a side, where a tower has no positions for more."""

MOST_TILES = 10
"""Of a picture of LFM2-VL."""

Size = tuple[int, int]
"""Width and height."""

Resizes = list[list[Size]]
"""How the views of a picture are made: each by resizing it, once or several times."""

Layout = Sequence[int | str]
"""A picture's tokens: numbers of image tokens, and the text between them."""


class Cut(tuple[int, int]):
    """A size to which a picture is not resized: its middle is cut out, or black is added on its
    right and below it."""


Colour = tuple[int, int, int]


class Framed(tuple[int, int]):
    """A size in whose middle a picture is put, on a colour."""

    colour: Colour


class Recipe(msgspec.Struct, frozen=True):
    def within(self, tokens: int) -> Self:
        """The recipe of pictures with so many tokens at most, if their size decides on them."""
        return self

    def layout(self, sizes: Sequence[Size]) -> Layout:
        """The tokens of a picture whose views have these sizes."""
        raise NotImplementedError


class PatchGrid(Recipe, frozen=True, tag=True):
    """A picture keeps its aspect; squares of `merge` times `merge` patches are its tokens."""

    patch: int
    merge: int
    least: int
    """The least number of pixels of a picture, as far as whole tokens allow; so is `most`."""
    most: int

    @property
    def cell(self) -> int:
        """The pixels of the side of one token."""
        return self.patch * self.merge

    def within(self, tokens: int) -> Self:
        most = min(self.most, tokens * self.cell**2)
        return replace(self, least=min(self.least, most), most=most)

    def resizes(self, width: int, height: int) -> Resizes:
        return [[grid_size((width, height), self.cell, self.least, self.most)]]

    def grid(self, size: Size) -> tuple[int, int]:
        """The rows and columns of tokens."""
        return size[1] // self.cell, size[0] // self.cell

    def layout(self, sizes: Sequence[Size]) -> Layout:
        rows, columns = self.grid(sizes[0])
        return [rows * columns]


def grid_size(size: Size, cell: int, least: int, most: int, least_side: int = 0) -> Size:
    """The multiples of `cell` that are nearest to a picture's size, and between so many pixels.

    least_side: the least cells of a side, as far as the pixels are within their limits.
    """
    width, height = size
    wide, high = (max(least_side, round(side / cell)) * cell for side in size)
    if wide * high > most:
        times = math.sqrt(width * height / most)
        wide, high = (max(1, int(side / times / cell)) * cell for side in size)
    elif wide * high < least:
        times = math.sqrt(least / (width * height))
        wide, high = (math.ceil(side * times / cell) * cell for side in size)
    return wide, high


class FramesGrid(PatchGrid, frozen=True):
    """A picture's smaller side is made as large as a token first, if it is smaller."""

    def resizes(self, width: int, height: int) -> Resizes:
        times = max(1, self.cell / min(width, height))
        return super().resizes(int(width * times), int(height * times))


class LinesGrid(PatchGrid, frozen=True):
    """A token ends each row, one begins the picture and one ends it; the tower embeds them."""

    def within(self, tokens: int) -> Self:
        return super().within(tokens - tokens // 16)

    def layout(self, sizes: Sequence[Size]) -> Layout:
        rows, columns = self.grid(sizes[0])
        return [rows * (columns + 1) + 2]


class CutGrid(PatchGrid, frozen=True):
    """A picture is made smaller if it has too many patches. Then its sides become multiples of
    `cell` without another resizing."""

    is_filled: bool
    """Whether black is added to a picture, not cut off."""

    def resizes(self, width: int, height: int) -> Resizes:
        cell, count = self.cell, width // self.patch * (height // self.patch)
        times = min(1, math.sqrt(self.most // self.patch**2 / max(1, count)))
        times = min(times, (MOST_PATCHES * self.patch - cell) / max(width, height))
        least = 1 if self.is_filled else cell
        wide, high = (max(least, int(side * times)) for side in (width, height))
        more = cell - 1 if self.is_filled else 0
        return [[(wide, high), Cut((s + more) // cell * cell for s in (wide, high))]]


class OneSquare(Recipe, frozen=True, tag=True):
    side: int
    tokens: int
    shorter: int = 0
    """The pixels of the shorter side of a picture of which the middle is shown; 0: all of it is
    shown."""
    end: str = ""
    """The token that follows, if the tower embeds it."""
    frame: Colour | None = None
    """The colour of the square in whose middle a picture is put first."""

    def resizes(self, width: int, height: int) -> Resizes:
        square = self.side, self.side
        if self.frame:
            times = min(1, MOST_FRAMED / max(width, height))
            size = max(1, int(width * times)), max(1, int(height * times))
            framed = Framed((max(size), max(size)))
            framed.colour = self.frame
            return [[size, framed, square]]
        if not self.shorter:
            return [[square]]
        times = self.shorter / min(width, height)
        longer = min(int(max(width, height) * times), MOST_LONGER * self.shorter)
        size = (self.shorter, longer) if width <= height else (longer, self.shorter)
        return [[size, Cut(square)]]

    def layout(self, sizes: Sequence[Size]) -> Layout:
        return [self.tokens, self.end] if self.end else [self.tokens]


class LongestSide(Recipe, frozen=True, tag=True):
    """A picture keeps its aspect and is made no larger; its sides become multiples of `cell`."""

    cell: int
    longest: int
    """The most pixels of a side."""

    def resizes(self, width: int, height: int) -> Resizes:
        ratio = max(width, height) / self.longest
        if ratio > 1:
            width, height = (max(1, math.floor(side / ratio)) for side in (width, height))
        return [[(-(-width // self.cell) * self.cell, -(-height // self.cell) * self.cell)]]


class TokenRows(LongestSide, frozen=True):
    """Each row of a picture's tokens ends with a token of its own."""

    between: str
    end: str

    def within(self, tokens: int) -> Self:
        return replace(self, longest=min(self.longest, int(tokens**0.5) * self.cell))

    def layout(self, sizes: Sequence[Size]) -> Layout:
        (width, height), *_ = sizes
        row = (width // self.cell, self.between)
        return [*row * (height // self.cell - 1), row[0], self.end]


class FilledGrid(Recipe, frozen=True, tag=True):
    """A picture keeps its aspect, and is made as large as a number of tokens allows."""

    cell: int
    tokens: int

    def within(self, tokens: int) -> Self:
        return replace(self, tokens=min(tokens, self.tokens))

    def resizes(self, width: int, height: int) -> Resizes:
        cell = self.cell
        factor = math.sqrt(self.tokens * cell**2 / (width * height))
        wide, high = (math.floor(factor * side / cell) for side in (width, height))
        if not high:
            wide, high = min(width // height, self.tokens), 1
        elif not wide:
            wide, high = 1, min(height // width, self.tokens)
        return [[(wide * cell, high * cell)]]

    def layout(self, sizes: Sequence[Size]) -> Layout:
        (width, height), *_ = sizes
        return [width // self.cell * (height // self.cell)]


class TileGrid(Recipe, frozen=True, tag=True):
    """A picture is shown in square tiles; if these are several, also as a whole in one more."""

    side: int
    tokens: int
    """Of a tile."""
    least: int
    most: int
    """The least and the most tiles."""
    is_whole: bool = True
    """Whether the picture as a whole is shown."""

    def within(self, tokens: int) -> Self:
        most = max(1, min(self.most, tokens // self.tokens - self.is_whole))
        return replace(self, least=min(self.least, most), most=most)

    def resizes(self, width: int, height: int) -> Resizes:
        tiles = nearest_tiles((width, height), self.side, self.least, self.most)
        whole = self.side, self.side
        return [[tiles], [whole]] if self.is_whole and tiles != whole else [[tiles]]

    def layout(self, sizes: Sequence[Size]) -> Layout:
        return [sum(width * height for width, height in sizes) // self.side**2 * self.tokens]


def nearest_tiles(size: Size, tile: int, least: int, most: int) -> Size:
    """The size of so many tiles together whose aspect is nearest to a picture's."""
    width, height = size
    sides = range(1, most + 1)
    grids = [(x, y) for x in sides for y in sides if least <= x * y <= most]
    best, nearest = (1, 1), math.inf
    for x, y in sorted(set(grids), key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - x / y)
        is_small = width * height <= 0.5 * tile**2 * x * y
        if distance < nearest or (distance == nearest and not is_small):
            best, nearest = (x, y), distance
    return best[0] * tile, best[1] * tile


class NamedTiles(Recipe, frozen=True, tag=True):
    """A large picture is shown in tiles, each after a token with its row and column, and as a
    whole, after a token of its own."""

    patch: int
    merge: int
    tile: int
    least: int
    most: int
    """The least and the most tokens of the whole."""
    tolerance: float
    """How many times the pixels of the whole a picture may have that is not large."""

    def within(self, tokens: int) -> Self:
        has_tiles = tokens >= MOST_TILES * self._count((self.tile, self.tile))
        tolerance = self.tolerance if has_tiles else math.inf
        return replace(self, most=min(self.most, tokens), tolerance=tolerance)

    def resizes(self, width: int, height: int) -> Resizes:
        size, cell = (width, height), self.patch * self.merge
        whole = grid_size(size, cell, self.least * cell**2, self.most * cell**2, least_side=1)
        wide, high = (max(cell / 2, round(side / cell) * cell) for side in size)
        if wide * high <= self.most * cell**2 * self.tolerance:
            return [[whole]]
        return [[nearest_tiles(size, self.tile, 2, MOST_TILES)], [whole]]

    def _count(self, size: Size) -> int:
        width, height = (-(-(side // self.patch) // self.merge) for side in size)
        return width * height

    def layout(self, sizes: Sequence[Size]) -> Layout:
        if len(sizes) == 1:
            return [self._count(sizes[0])]
        (width, height), whole = sizes
        layout: list[int | str] = []
        for row in range(1, height // self.tile + 1):
            for column in range(1, width // self.tile + 1):
                layout += [f"<|img_row_{row}_col_{column}|>", self._count((self.tile, self.tile))]
        return [*layout, "<|img_thumbnail|>", self._count(whole)]


class TileRows(Recipe, frozen=True, tag=True):
    """A picture's longer side is made `longest`, and both are then made multiples of a square tile.
    It is shown in rows of tiles, each after tokens with its row and column, and as a whole in one
    more."""

    tile: int
    longest: int
    tokens: int
    """Of a tile."""

    def within(self, tokens: int) -> Self:
        side = max(1, math.isqrt(max(1, tokens // self.tokens - 1)))
        return replace(self, longest=min(self.longest, side * self.tile))

    def resizes(self, width: int, height: int) -> Resizes:
        is_wide = width >= height
        shorter = int(self.longest / (max(width, height) / min(width, height)))
        first = (self.longest, max(1, shorter + shorter % 2))
        ratio = first[0] / first[1]
        longer = -(-self.longest // self.tile) * self.tile
        second = (longer, max(1, math.ceil(int(longer / ratio) / self.tile)) * self.tile)
        chain = [first, second] if is_wide else [first[::-1], second[::-1]]
        if second == (self.tile, self.tile):
            return [chain]
        return [chain, [*chain, (self.tile, self.tile)]]

    def layout(self, sizes: Sequence[Size]) -> Layout:
        fake, layout, begin = "<fake_token_around_image>", list[int | str](), ""
        width, height = sizes[0] if len(sizes) > 1 else (0, 0)
        for row in range(1, height // self.tile + 1):
            for column in range(1, width // self.tile + 1):
                layout += [f"{begin}{fake}<row_{row}_col_{column}>", self.tokens]
                begin = ""
            begin = "\n"
        return [*layout, f"{2 * begin}{fake}<global-img>", self.tokens, fake]


PictureRecipe = (
    PatchGrid
    | FramesGrid
    | LinesGrid
    | CutGrid
    | OneSquare
    | LongestSide
    | TokenRows
    | FilledGrid
    | TileGrid
    | NamedTiles
    | TileRows
)
