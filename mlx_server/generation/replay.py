"""Makes rows of replay models play their recordings, and explains where one leaves its grammar."""

import json
from functools import partial

from mlx_server.checkpoints.tokenizer import Tokenizer
from mlx_server.engine.messages import Generate, RowLeftGrammar
from mlx_server.errors import RecordingLeftGrammar
from mlx_server.pool.prepare import PreparedModel
from mlx_server.requests import GenerateRequest
from mlx_server.sources.transcript import Recording

SHOWN_OUTPUT = 60
"""The number of characters of output that the error shows before the rejected token."""


def play(prepared: PreparedModel, row: Generate, recording: Recording) -> None:
    """Make the row play a recorded answer, at the recording's pace."""
    tokenizer, entry = prepared.checkpoint.tokenizer, recording.entry
    row.prompt = row.prompt + tokenizer.encode(entry.generation_prompt)
    row.delay = entry.delay_ms / 1000
    output = entry.tokens(tokenizer, prepared.family)
    row.forced_tokens = [*output, row.stop_tokens[0]]
    row.recording = recording.name if entry.off_grammar == "error" else ""
    if entry.finish == "length":
        row.recording_is_cut = True
        row.end_within(len(output))


def departure_error(
    prepared: PreparedModel, request: GenerateRequest, row: Generate, left: RowLeftGrammar
) -> RecordingLeftGrammar:
    """The error for a recording that the request's grammar does not allow."""
    tokenizer = prepared.checkpoint.tokenizer
    before = tokenizer.raw(left.before)
    place = f"after {_quoted(before[-SHOWN_OUTPUT:])}" if before else "at its beginning"
    name = partial(_token_name, tokenizer, row)
    others = f" or {left.others} other tokens" if left.others else ""
    param = request.format_param if request.format else "tools"
    settings = "" if request.format else ", or set `constrain_calls: false` for this model"
    return RecordingLeftGrammar(
        f"The output of {row.recording} leaves the grammar of this request at token "
        f"{left.at + 1}, {place}: it has {name(left.token)}, where the grammar "
        f"takes {', '.join(map(name, left.allowed))}{others}. Correct the entry, or the request's "
        f"`{param}`{settings}.",
        param=param,
    )


def _token_name(tokenizer: Tokenizer, row: Generate, token: int) -> str:
    spelled = tokenizer.spelling(token)
    return f"the end of the answer ({spelled})" if token in row.stop_tokens else _quoted(spelled)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
