"""Logs for people and for grep: one line each, colour only on a terminal."""

import logging
import sys

COLOURS = {"DEBUG": "\033[2m", "INFO": "\033[32m", "WARNING": "\033[33m", "ERROR": "\033[31m"}
PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class _Coloured(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        level = f"{record.levelname:<7}"
        return line.replace(level, f"{COLOURS.get(record.levelname, '')}{level}\033[0m", 1)


def configure(level: str) -> None:
    formatter = (_Coloured if sys.stderr.isatty() else logging.Formatter)(PLAIN)
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[output], force=True)
    # httpx, huggingface_hub and uvicorn tell of things that are ours to tell
    for chatty in ("uvicorn", "httpx", "huggingface_hub", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
