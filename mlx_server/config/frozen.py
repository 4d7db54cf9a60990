"""How all settings are validated."""

from pydantic import ConfigDict

FROZEN = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    hide_input_in_errors=True,  # the input may be a key
)
