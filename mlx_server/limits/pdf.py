"""Limits on PDF files within messages."""

from mlx_server.limits.limit import Limit

PDF_PAGES = Limit("pages of a PDF file", 2000, "items", "request", beyond="400")
PDF_CHARACTERS = Limit("the text of a PDF file", 16 << 20, "characters", "request", beyond="400")
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
    "processes that read PDF files", 2, "processes", "server", beyond="it waits for one"
)
IDLE_PDF_PROCESSES = Limit(
    "idle processes that read PDF files", 1, "processes", "server", beyond="it ends"
)
