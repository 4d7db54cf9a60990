"""Pictures as models are shown them, and files that are made to harm their reader."""

import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest

from mlx_server import limits
from mlx_server.system.sandbox.files import PICTURE_PROCESSES, FileRefused, decoded
from mlx_server.system.sandbox.picture_recipes import CutGrid, OneSquare, PatchGrid, TileGrid

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")

WHITE, RED, BLUE = (255, 255, 255), (200, 10, 20), (0, 0, 255)
SAME = PatchGrid(1, 1, 1, 1 << 30)
"""Pictures keep their size."""

ZEROS = zlib.compress(bytes(64 << 20), 9)
SMALL = zlib.compress(bytes(8 * 25))


def saved(image: Any, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def image(colour: Any = RED, size: tuple[int, int] = (80, 40), mode: str = "RGB") -> Any:
    return Image.new(mode, size, colour)


def halves() -> Any:
    both = image()
    both.paste(BLUE, (0, 0, 40, 40))
    return both


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(halves(), "JPEG", exif=exif, quality=95)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, body: bytes, *more: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def pixel(data: bytes, at: int = 0) -> tuple[int, ...]:
    _, pixels = decoded(data, SAME, 3)
    return tuple(pixels[3 * at : 3 * at + 3])


def refusal(data: bytes) -> str:
    with pytest.raises(FileRefused) as refused:
        decoded(data, SAME, 3)
    return str(refused.value)


ODD: list[tuple[Callable[[], bytes], tuple[int, ...]]] = [
    (lambda: saved(image(), "PNG"), RED),
    (lambda: saved(image(WHITE), "JPEG"), WHITE),
    (lambda: saved(image(WHITE).convert("CMYK"), "JPEG"), WHITE),
    (lambda: saved(image(), "WEBP", lossless=True), RED),
    (lambda: saved(image((255, 0, 0, 0), mode="RGBA"), "PNG"), WHITE),
    (lambda: saved(image((9, 0), mode="LA"), "PNG"), WHITE),
    (lambda: saved(image(0, mode="P"), "PNG", transparency=0), WHITE),
    (lambda: saved(image(51400, mode="I;16"), "PNG"), (200, 200, 200)),
    (lambda: saved(image(1, mode="1"), "PNG"), WHITE),
    (lambda: saved(image(), "GIF", save_all=True, append_images=[halves()] * 200), RED),
    (
        lambda: saved(image(), "WEBP", save_all=True, lossless=True, append_images=[halves()]),
        RED,
    ),
    (lambda: saved(image(size=(1, 1)), "PNG"), RED),
    (lambda: saved(image(), "PNG", save_all=True, append_images=[halves()] * 200), RED),
    (lambda: saved(image(WHITE), "JPEG", progressive=True), WHITE),
    (lambda: saved(image(255, mode="L"), "JPEG"), WHITE),
    (
        lambda: saved(image(WHITE), "JPEG", exif=b"Exif\0\0" + b"MM\0*\xff\xff\xff\xff" * 99),
        WHITE,
    ),
    (lambda: saved(image(WHITE), "JPEG", icc_profile=bytes(60000)), WHITE),
    (lambda: saved(image(WHITE), "JPEG") + ZEROS, WHITE),
    (lambda: png(8, 8, SMALL, chunk(b"acTL", struct.pack(">II", 1 << 30, 0))), (0, 0, 0)),
    (lambda: png(8, 8, SMALL, chunk(b"fOOo", bytes(9))), (0, 0, 0)),
    (lambda: png(8, 8, SMALL, chunk(b"PLTE", bytes(3 * 300))), (0, 0, 0)),
    (lambda: png(8, 8, SMALL)[:-12], (0, 0, 0)),
]
"""Pictures of all kinds, and the colour of their first pixel."""


@pytest.mark.parametrize(
    ("data", "first"),
    ODD,
    ids=[
        *("PNG", "JPEG", "CMYK", "WebP", "transparent", "gray and alpha", "palette", "16 bits"),
        *("1 bit", "GIF", "animated WebP", "one pixel", "animated PNG", "progressive", "gray JPEG"),
        *("damaged EXIF", "no profile", "more after its end", "frames that are not there"),
        *("a chunk of another program", "more colours than a palette has", "no end"),
    ],
)
def test_a_picture_is_on_white_in_rgb(data: Callable[[], bytes], first: tuple[int, ...]) -> None:
    assert all(abs(a - b) <= 2 for a, b in zip(pixel(data()), first, strict=True))


def test_a_picture_is_turned_as_its_camera_was() -> None:
    sizes, pixels = decoded(turned(), SAME, 3)
    assert sizes == [(40, 80)]
    assert pixels[2] > 200, "the left half is at the top"
    assert pixels[-3] > 150


def test_a_picture_has_the_size_for_the_model() -> None:
    data = saved(halves(), "PNG")
    assert decoded(data, OneSquare(7, 1), 2)[0] == [(7, 7)]
    sizes, pixels = decoded(data, PatchGrid(16, 2, 64 * 64, 1 << 20), 3)
    assert sizes == [(96, 64)]
    assert len(pixels) == 3 * 96 * 64


HARMFUL: list[tuple[bytes | Callable[[], bytes], str]] = [
    (b"", "no PNG, JPEG, WEBP or GIF"),
    (b"GIF89a", "no PNG"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no PNG"),
    (
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        "no PNG",
    ),
    (b"\0\0\0\x18ftypheic" + bytes(100), "sips -s format jpeg"),
    (b"\0\0\0\x18ftypavif" + bytes(100), "Convert it to JPEG"),
    (lambda: saved(image(), "BMP"), "no PNG"),
    (lambda: saved(image(), "TIFF"), "no PNG"),
    (lambda: saved(image(), "JPEG")[:400], "damaged"),
    (lambda: saved(image(), "PNG")[:60], "damaged"),
    (png(60000, 60000, SMALL), "60000 x 60000; the limit is 20,000,000 pixels"),
    (png(1, 20000, ZEROS), "over 200 times"),
    (png(8, 8, SMALL, chunk(b"zTXt", b"a\0\0" + ZEROS)), "damaged"),
    (png(8, 8, SMALL, chunk(b"iCCP", b"a\0\0" + ZEROS)), "damaged"),
    (png(8, 8, b"\xff" * 100), "damaged"),
    (png(0, 0, SMALL), ""),
    (png(8, 8, b""), "damaged"),
    (png(8, 8, SMALL).replace(b"IDAT", b"IDAX"), "no PNG"),
    (png((1 << 31) - 1, 1, SMALL), "the limit is 20,000,000 pixels"),
    (png(4472, 4472, SMALL), "damaged"),
    (lambda: saved(image(), "GIF")[:30], "no PNG"),
    (lambda: saved(image(), "WEBP")[:40], "damaged"),
    (b"RIFF\xff\xff\xff\xffWEBPVP8X" + b"\xff" * 40, ""),
    (b"GIF89a\xff\xff\xff\xff" + bytes(9), "no PNG"),
    (b"\xff\xd8" + b"\xff\xe1\0\x02" * 50_000, ""),
    (
        lambda: saved(image(), "JPEG").replace(b"\0\x28\0\x50", b"\xff\xff\xff\xff"),
        "65535 x 65535",
    ),
]
"""Files that are no pictures, and what their refusal says."""


@pytest.mark.parametrize(("data", "why"), HARMFUL)
def test_a_file_that_is_no_picture_is_refused_and_the_next_one_is_read(
    data: bytes | Callable[[], bytes], why: str
) -> None:
    assert why in refusal(data if isinstance(data, bytes) else data())
    assert pixel(saved(image(), "PNG")) == RED


def test_a_picture_is_cut_and_filled_up() -> None:
    file = saved(halves(), "PNG")
    _, pixels = decoded(file, OneSquare(20, 1, 40), 3)
    middle = Image.frombytes("RGB", (20, 20), pixels)
    assert {middle.getpixel((0, 0)), middle.getpixel((19, 0))} == {BLUE, RED}
    ((size,), pixels) = decoded(file, CutGrid(10, 3, 0, 100 * 100, True), 3)
    filled = Image.frombytes("RGB", size, pixels)
    assert size == (90, 60)
    assert [filled.getpixel(place) for place in ((0, 0), (79, 39), (80, 0), (0, 40))] == [
        BLUE,
        RED,
        (0, 0, 0),
        (0, 0, 0),
    ]
    assert decoded(file, CutGrid(10, 3, 0, 100 * 100, False), 3)[0] == [(60, 30)]
    ((size,), pixels) = decoded(file, OneSquare(20, 1, frame=(1, 2, 3)), 0)
    framed = Image.frombytes("RGB", size, pixels)
    places = [(0, 4), (0, 5), (19, 14), (19, 15)]
    assert [framed.getpixel(place) for place in places] == [(1, 2, 3), BLUE, RED, (1, 2, 3)]
    assert OneSquare(20, 1, frame=(1, 2, 3)).resizes(40_000, 10)[0][:2] == [(3000, 1), (3000, 3000)]
    assert decoded(file, TileGrid(20, 1, 1, 4), 3)[0] == [(40, 20), (20, 20)]


def test_time_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.PICTURE_SECONDS < 6, "within which each harmful file is answered"
    side = 2000
    file = png(side, side, zlib.compress(bytes(side * (3 * side + 1)), 9))
    assert decoded(file, TileGrid(20, 1, 1, 1), 3)[0] == [(20, 20)]
    monkeypatch.setattr(limits, "PICTURE_SECONDS", 0.02)
    assert "can't be read" in refusal(file)


def test_processes_and_their_memory_have_limits() -> None:
    assert PICTURE_PROCESSES._program.memory == limits.PICTURE_MEMORY
    assert PICTURE_PROCESSES._most_each == limits.CLIENT_PICTURE_PROCESSES
    assert PICTURE_PROCESSES._most_idle == limits.IDLE_PICTURE_PROCESSES
