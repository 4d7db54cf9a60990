"""The text of PDF files, read in a warm process with limits: a file can make its reader endless."""

from mlx_server.pdf.text import PdfRefused, text_of

__all__ = ["PdfRefused", "text_of"]
