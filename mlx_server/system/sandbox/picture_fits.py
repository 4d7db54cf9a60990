"""The sizes in which a model is shown pictures of a size."""

import math

import msgspec

MOST_LONGER = 100
"""How many times the longer side of a picture may be the shorter one, if most of it is cut off."""

MOST_FRAMED = 3000
"""The most pixels of the side of a square in whose middle a picture is put."""

MOST_PATCHES = 512
"""Of a side, where a tower has no positions for more."""

Size = tuple[int, int]
"""Width and height."""

Resizes = list[list[Size]]
"""How the views of a picture are made: each by resizing it, once or several times."""


class Cut(tuple[int, int]):
    """A size to which a picture is not resized: its middle is cut out, or black is added on its
    right and below it."""


Colour = tuple[int, int, int]


class Framed(tuple[int, int]):
    """A size in whose middle a picture is put, on a colour."""

    colour: Colour


class Square(msgspec.Struct, frozen=True, tag=True):
    """Each picture is made a square of the same size."""

    side: int

    def resizes(self, width: int, height: int) -> Resizes:
        return [[(self.side, self.side)]]


class FramedSquare(Square, frozen=True, tag=True):
    """Each picture is put in the middle of a square of a colour first."""

    colour: Colour

    def resizes(self, width: int, height: int) -> Resizes:
        times = min(1, MOST_FRAMED / max(width, height))
        size = max(1, int(width * times)), max(1, int(height * times))
        framed = Framed((max(size), max(size)))
        framed.colour = self.colour
        return [[size, framed, (self.side, self.side)]]


class MiddleSquare(msgspec.Struct, frozen=True, tag=True):
    """Each picture's shorter side is made `shorter`, and a square of its middle is shown."""

    side: int
    shorter: int

    def resizes(self, width: int, height: int) -> Resizes:
        times = self.shorter / min(width, height)
        longer = min(int(max(width, height) * times), MOST_LONGER * self.shorter)
        size = (self.shorter, longer) if width <= height else (longer, self.shorter)
        return [[size, Cut((self.side, self.side))]]


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
    least_side: int = 0
    """The least cells of a side, as far as the pixels are within their limits."""

    def resizes(self, width: int, height: int) -> Resizes:
        cell = self.cell
        wide, high = (max(self.least_side, round(s / cell)) * cell for s in (width, height))
        if wide * high > self.most:
            times = math.sqrt(width * height / self.most)
            wide, high = (max(1, int(side / times / cell)) * cell for side in (width, height))
        elif wide * high < self.least:
            times = math.sqrt(self.least / (width * height))
            wide, high = (math.ceil(side * times / cell) * cell for side in (width, height))
        return [[(wide, high)]]


class LeastSide(msgspec.Struct, frozen=True, tag=True):
    """As in the grid, of a picture whose smaller side has been made as large as a cell, if it is
    smaller."""

    grid: Grid

    def resizes(self, width: int, height: int) -> Resizes:
        times = max(1, self.grid.cell / min(width, height))
        return self.grid.resizes(int(width * times), int(height * times))


class Patches(msgspec.Struct, frozen=True, tag=True):
    """Each picture keeps its aspect, and is made smaller if it has too many patches. Then its sides
    become multiples of `cell` without another resizing."""

    patch: int
    cell: int
    most: int
    is_filled: bool
    """Whether black is added."""

    def resizes(self, width: int, height: int) -> Resizes:
        cell, count = self.cell, width // self.patch * (height // self.patch)
        times = min(1, math.sqrt(self.most / max(1, count)))
        times = min(times, (MOST_PATCHES * self.patch - cell) / max(width, height))
        least = 1 if self.is_filled else cell
        wide, high = (max(least, int(side * times)) for side in (width, height))
        more = cell - 1 if self.is_filled else 0
        return [[(wide, high), Cut((s + more) // cell * cell for s in (wide, high))]]


class Filled(msgspec.Struct, frozen=True, tag=True):
    """Each picture keeps its aspect and is made as large as a number of squares allows."""

    cell: int
    most: int

    def resizes(self, width: int, height: int) -> Resizes:
        cell = self.cell
        factor = math.sqrt(self.most * cell**2 / (width * height))
        wide, high = (math.floor(factor * side / cell) for side in (width, height))
        if not high:
            wide, high = min(width // height, self.most), 1
        elif not wide:
            wide, high = 1, min(height // width, self.most)
        return [[(wide * cell, high * cell)]]


class NearestTiles(msgspec.Struct, frozen=True, tag=True):
    """Each picture is shown in square tiles; if these are several, also as a whole in one."""

    tile: int
    least: int
    most: int
    """The least and the most tiles."""

    def resizes(self, width: int, height: int) -> Resizes:
        tiles, whole = self.tiles(width, height), [(self.tile, self.tile)]
        return [[tiles], whole] if tiles != whole[0] else [whole]

    def tiles(self, width: int, height: int) -> Size:
        """The size of the tiles together, whose aspect is nearest to the picture's."""
        sides = range(1, self.most + 1)
        grids = [(x, y) for x in sides for y in sides if self.least <= x * y <= self.most]
        best, nearest = (1, 1), math.inf
        for x, y in sorted(set(grids), key=lambda grid: grid[0] * grid[1]):
            distance = abs(width / height - x / y)
            is_small = width * height <= 0.5 * self.tile**2 * x * y
            if distance < nearest or (distance == nearest and not is_small):
                best, nearest = (x, y), distance
        return best[0] * self.tile, best[1] * self.tile


class TilesAlone(NearestTiles, frozen=True, tag=True):
    """Each picture is shown in square tiles, and not as a whole."""

    def resizes(self, width: int, height: int) -> Resizes:
        return [[self.tiles(width, height)]]


class Tiles(NearestTiles, frozen=True, tag=True):
    """A small picture is shown as a whole; a large one in square tiles, and small as a whole."""

    whole: Grid
    large: int
    """The pixels above which a picture is large."""

    def resizes(self, width: int, height: int) -> Resizes:
        ((whole,),) = self.whole.resizes(width, height)
        cell = self.whole.cell
        wide, high = (max(cell / 2, round(side / cell) * cell) for side in (width, height))
        if wide * high <= self.large:
            return [[whole]]
        return [[self.tiles(width, height)], [whole]]


class LongestTiles(msgspec.Struct, frozen=True, tag=True):
    """Each picture's longer side is made `longest`, and both are then made multiples of a square
    tile. Several tiles are shown together with the whole in one tile."""

    tile: int
    longest: int

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


Fit = (
    Square
    | FramedSquare
    | MiddleSquare
    | LongestSide
    | LeastSide
    | LongestTiles
    | Filled
    | NearestTiles
    | TilesAlone
    | Tiles
    | Patches
    | Grid
)
"""The sizes that a picture has for a model, by the size of its file."""
