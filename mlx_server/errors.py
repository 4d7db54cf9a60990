"""Errors that a user, a client or a disk can cause. Our own bugs are `assert`s."""

import difflib
import os
import re
from collections.abc import Collection
from typing import Any, ClassVar

from mlx_server import limits

FOLDERS = re.compile(r"(?<![\w:/.])~?/(?:.*/)?")
"""Matches from a line's first folder to its last, since folder names may contain spaces."""


NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's and Anthropic's clients read this header; else they repeat what failed with a 5xx."""


class ServerError(Exception):
    """An error with a status and OpenAI's body. The message says what was wrong and what to do."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def body(self) -> dict[str, Any]:
        cut = self.message[: limits.ERROR_CHARACTERS - 3] + "..."
        error = {
            "message": self.message if len(self.message) <= limits.ERROR_CHARACTERS else cut,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class BadRequest(ServerError):
    status = 400
    type = "invalid_request_error"


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"


class NotEnoughMemory(BadRequest):
    code = "not_enough_memory"


class AdapterInvalid(BadRequest):
    code = "adapter_invalid"


class TrainingDataInvalid(BadRequest):
    code = "invalid_training_file"


class InvalidGrammar(BadRequest):
    code = "invalid_json_schema"


class AnswerUnwritable(BadRequest):
    """A model family can't write an answer that was given for it."""

    code = "answer_unwritable"


class NoRecording(BadRequest):
    """No entry of a replay model's transcript answers the request."""

    code = "no_recording"


class RecordingLeftGrammar(BadRequest):
    """A recorded answer is not what the request requires."""

    code = "recording_left_grammar"


class TranscriptBroken(BadRequest):
    code = "transcript_broken"


class Unauthorized(ServerError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    headers: ClassVar[dict[str, str]] = {"WWW-Authenticate": "Bearer"}


class Forbidden(ServerError):
    """A Host or Origin that may not use this server."""

    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class NotFound(ServerError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class AdapterNotFound(NotFound):
    code = "adapter_not_found"


class MethodNotAllowed(ServerError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class TrainingFailed(ServerError):
    """The process that trains an adapter has ended with an error."""

    code = "training_failed"


class ComparisonFailed(ServerError):
    """The process that compares two models has ended with an error."""

    code = "comparison_failed"


class BatchEnded(ServerError):
    status = 409
    type = "invalid_request_error"


class TooLarge(ServerError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaType(ServerError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class Unavailable(ServerError):
    status = 503
    code = "unavailable"
    headers: ClassVar[dict[str, str]] = {"Retry-After": "1"}


class Overloaded(Unavailable):
    code = "overloaded"


class EngineDied(Unavailable):
    code = "engine_died"


class ModelSuspended(Unavailable):
    """Engines have ended again and again while they loaded the model or began its answers."""

    code = "model_suspended"
    headers: ClassVar[dict[str, str]] = {"Retry-After": "60"}


class ModelReplaced(Unavailable):
    """The model's files changed after the request arrived."""

    code = "model_replaced"


class StoreUnavailable(Unavailable):
    code = "store_unavailable"


class TemplatesUnavailable(Unavailable):
    code = "templates_unavailable"


class TokenizerUnavailable(Unavailable):
    code = "tokenizer_unavailable"


class PdfUnavailable(Unavailable):
    code = "pdf_unavailable"


class PicturesUnavailable(Unavailable):
    code = "pictures_unavailable"


class CompilerUnavailable(Unavailable):
    """No process compiles the schema: none starts, or it is starved."""

    code = "compiler_unavailable"


class CompilerTooSlow(CompilerUnavailable):
    code = "compiler_too_slow"


class UpstreamBusy(Unavailable):
    code = "upstream_busy"


class ShuttingDown(Unavailable):
    code = "shutting_down"


class StoreFull(ServerError):
    status = 507
    code = "store_full"
    headers: ClassVar[dict[str, str]] = NO_RETRY


class UpstreamFailed(ServerError):
    status = 502
    code = "upstream_failed"


class UpstreamTimeout(UpstreamFailed):
    status = 504
    code = "upstream_timeout"


class UpstreamLoop(UpstreamFailed):
    """Servers pass the request on to each other."""

    status = 508
    code = "upstream_loop"
    headers: ClassVar[dict[str, str]] = NO_RETRY


class GenerationFailed(ServerError):
    """The engine could not continue this one answer."""

    code = "generation_failed"


class RequestEndsEngine(ServerError):
    """Each engine that began the request has ended."""

    code = "request_ends_engine"
    headers: ClassVar[dict[str, str]] = NO_RETRY


class ModelUnusable(ServerError):
    code = "model_unusable"
    headers: ClassVar[dict[str, str]] = NO_RETRY
    of_files: bool = True
    """Whether it is due to the model's files alone, which give it until they are changed."""
    stamp: tuple[tuple[str, int, int, int], ...] = ()
    """The stamp of these files; empty as long as it is not known."""


class SettingsError(ServerError):
    code = "settings"


NEAREST = 3


def served_names(name: str, served: Collection[str]) -> str:
    """A sentence with the names that are served; if there are many, those nearest to `name`."""
    if len(served) <= NEAREST:
        return f"Served: {', '.join(served) or 'none'}."
    nearest = ", ".join(nearest_names(name, served))
    return f"The nearest of the {len(served)} that are served: {nearest}."


def nearest_names(name: str, known: Collection[str]) -> list[str]:
    by_lower = {each.lower(): each for each in known}
    nearest = difflib.get_close_matches(name[:100].lower(), by_lower, NEAREST, cutoff=0)
    return [by_lower[each] for each in nearest]


def message_of(error: Exception) -> str:
    """Returns the text of an error as a client may read it."""
    return error.message if isinstance(error, ServerError) else public_message(error)


def public_message(error: BaseException) -> str:
    """The text of a foreign error without the folders of this machine that it may name."""
    name = type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        file = f": {os.path.basename(os.fsdecode(error.filename))!r}" if error.filename else ""
        return f"{name}: {error.strerror}{file}"
    return FOLDERS.sub("", f"{name}: {error}")
