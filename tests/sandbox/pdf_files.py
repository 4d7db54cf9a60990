"""PDF files, made by hand."""

import zlib
from collections.abc import Sequence
from io import BytesIO

from pypdf import PdfReader, PdfWriter


def pdf(*pages: str | bytes, filters: str = "") -> bytes:
    """A file with a line of text on each page; bytes are the content of a page as it is."""
    kids = " ".join(f"{2 * i + 4} 0 R" for i in range(len(pages)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>".encode(),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for i, page in enumerate(pages):
        line = f"BT /F1 12 Tf 72 700 Td ({page}) Tj ET".encode() if isinstance(page, str) else page
        objects += [
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents {2 * i + 5} 0 R"
            "/Resources<</Font<</F1 3 0 R>>>>>>".encode(),
            f"<</Length {len(line)}{filters}>>stream\n".encode() + line + b"\nendstream",
        ]
    return assembled(objects)


def assembled(objects: Sequence[bytes]) -> bytes:
    body, places = bytearray(b"%PDF-1.7\n"), []
    for number, text in enumerate(objects, start=1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, text)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    tail = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF"
    return bytes(body) + head + table + tail % (len(objects) + 1, len(body))


def sharing(pages: int, content: bytes) -> bytes:
    """A file whose pages have the same content."""
    kids = b" ".join(b"%d 0 R" % (number + 5) for number in range(pages))
    page = (
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R"
        b"/Resources<</Font<</F1 3 0 R>>>>>>"
    )
    return assembled(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, pages),
            b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
            b"<</Length %d>>stream\n%s\nendstream" % (len(content), content),
            *[page] * pages,
        ]
    )


def composite(code: bytes, cmap: str) -> bytes:
    """A page with a text in a composite font. A predefined CMap says what its codes mean."""
    line = b"BT /F1 12 Tf 72 700 Td <%s> Tj ET" % code.hex().encode()
    return assembled(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R"
            b"/Resources<</Font<</F1 5 0 R>>>>>>",
            b"<</Length %d>>stream\n%s\nendstream" % (len(line), line),
            b"<</Type/Font/Subtype/Type0/BaseFont/F/Encoding/%s/DescendantFonts[6 0 R]>>"
            % cmap.encode(),
            b"<</Type/Font/Subtype/CIDFontType2/BaseFont/F/DW 1000"
            b"/CIDSystemInfo<</Registry(Adobe)/Ordering(Japan1)/Supplement 2>>>>",
        ]
    )


def with_forms(*drawn: Sequence[int]) -> bytes:
    """A page that draws the first of several forms. Each has the text x, and draws others."""
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R"
        b"/Resources<</Font<</F1 5 0 R>>/XObject<</X0 6 0 R>>>>>>",
        b"<</Length 6>>stream\n/X0 Do\nendstream",
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for others in drawn:
        line = b"BT /F1 1 Tf (x) Tj ET" + b"".join(b" /X%d Do" % other for other in others)
        named = b" ".join(b"/X%d %d 0 R" % (other, other + 6) for other in {*others})
        objects.append(
            b"<</Type/XObject/Subtype/Form/BBox[0 0 9 9]/Resources<</Font<</F1 5 0 R>>"
            b"/XObject<<%s>>>>/Length %d>>stream\n%s\nendstream" % (named, len(line), line)
        )
    return assembled(objects)


def locked(data: bytes, password: str) -> bytes:
    writer, file = PdfWriter(clone_from=PdfReader(BytesIO(data))), BytesIO()
    writer.encrypt(password, algorithm="AES-256")
    writer.write(file)
    return file.getvalue()


def bomb(size: int) -> bytes:
    """A page whose content is compressed a thousand times.

    The same compressed block is repeated: to compress a gigabyte would take seconds.
    """
    block, compress = b"0 " * (1 << 19), zlib.compressobj(9)
    head = compress.compress(b"") + compress.flush(zlib.Z_FULL_FLUSH)
    content = head + (compress.compress(block) + compress.flush(zlib.Z_FULL_FLUSH)) * (size >> 20)
    return pdf(content, filters="/Filter/FlateDecode")
