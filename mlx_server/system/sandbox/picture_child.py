"""Decodes pictures: the program of a warm process, `picture_child.py MEMORY_BYTES LIFELINE`.

Only pixels leave the process: no metadata, colour profile or further frame.
"""

from collections.abc import Iterable
from io import BytesIO

from PIL import Image, ImageFile, ImageOps, PngImagePlugin, UnidentifiedImageError

from mlx_server.system.sandbox.files import (
    MOST_ASPECT,
    FileRefused,
    FileReply,
    ReadPicture,
    run_reader,
)
from mlx_server.system.sandbox.picture_recipes import Cut, Framed, OneSquare, Size

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

HEIC = (b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"avif")
"""The names of formats of phones' cameras, in the first bytes of a file."""

Image.MAX_IMAGE_PIXELS = None  # the request's limit is checked before anything is decoded
ImageFile.LOAD_TRUNCATED_IMAGES = False
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 1 << 20


def read_picture(request: ReadPicture) -> tuple[FileReply, bytes]:
    try:
        image: Image.Image = Image.open(BytesIO(request.data), formats=FORMATS)
    except UnidentifiedImageError:
        raise FileRefused(_why_unknown(request.data)) from None
    width, height = image.size
    if width * height > request.pixels:
        limit = f"the limit is {request.pixels:,} pixels"
        raise FileRefused(f"is {width} x {height}; {limit}. Send it smaller")
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise FileRefused(f"is {width} x {height}: a side is over {MOST_ASPECT} times the other")
    image = _plain(ImageOps.exif_transpose(image))
    views = [resized(image, sizes, request.filter) for sizes in request.recipe.resizes(*image.size)]
    return FileReply([view.size for view in views]), b"".join(view.tobytes() for view in views)


def resized(image: Image.Image, sizes: Iterable[Size], filter: int) -> Image.Image:
    for size in sizes:
        if isinstance(size, Cut):
            (width, height), (wide, high) = size, image.size
            left, top = max(0, (wide - width) // 2), max(0, (high - height) // 2)
            image = image.crop((left, top, left + width, top + height))
        elif isinstance(size, Framed):
            left, top = (max(size) - image.width) // 2, (max(size) - image.height) // 2
            square = Image.new("RGB", size, size.colour)
            square.paste(image, (left, top))
            image = square
        elif image.size != size:
            image = image.resize(size, Image.Resampling(filter))
    return image


def _why_unknown(data: bytes) -> str:
    if data[4:8] == b"ftyp" and data[8:12] in HEIC:
        how = "on a Mac: sips -s format jpeg PICTURE.heic --out PICTURE.jpg"
        return f"is HEIC or AVIF, which is not read. Convert it to JPEG first ({how})"
    return f"is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file"


def _plain(image: Image.Image) -> Image.Image:
    """The picture in RGB, on white where it is transparent."""
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits
        gray = image.convert("I").point(lambda value: value / 256).convert("L")
        return gray.convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        above = image.convert("RGBA")
        image = Image.new("RGBA", above.size, "white")
        image.alpha_composite(above)
    return image.convert("RGB")


def _warm() -> None:
    """Decodes a picture of each format: nothing can be opened or imported afterwards."""
    Image.init()
    for kind in FORMATS:
        file = BytesIO()
        Image.new("RGB", (8, 8)).save(file, kind)
        request = ReadPicture(file.getvalue(), OneSquare(4, 1), 3, 64, 60)
        assert read_picture(request)[0] == FileReply([(4, 4)])


if __name__ == "__main__":
    run_reader(ReadPicture, read_picture, _warm)
