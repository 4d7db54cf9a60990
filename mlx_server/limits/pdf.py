"""Limits on PDF files within messages."""

from mlx_server.limits.limit import Limit

PDF_PAGES = Limit(
    bounds="pages of a PDF file",
    value=2000,
    unit="items",
    per="request",
    beyond="400",
)
PDF_CHARACTERS = Limit(
    bounds="the text of a PDF file",
    value=16 << 20,
    unit="characters",
    per="request",
    beyond="400",
)
PDF_SECONDS = Limit(
    bounds="processor time of reading a PDF file, which may take four times as long by the clock",
    value=20,
    unit="seconds",
    per="request",
    beyond="400, or 503 on a machine too busy to give it that time, and the process is killed",
)
PDF_MEMORY = Limit(
    bounds="memory of a process that reads PDF files",
    value=512 << 20,
    unit="bytes",
    per="server",
    beyond="400, and the process is killed",
)
PDF_PROCESSES = Limit(
    bounds="processes that read PDF files",
    value=2,
    unit="processes",
    per="server",
    beyond="it waits for one",
)
IDLE_PDF_PROCESSES = Limit(
    bounds="idle processes that read PDF files",
    value=1,
    unit="processes",
    per="server",
    beyond="it ends",
)
