"""Of the owner: what models.yaml says of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_server.config import settings
from tests.hostile.parameters.case import REPORTED, SAID, THINKS, Case, Json
from tests.hostile.parameters.chatting import FUNCTION, SAMPLING, asked, offered
from tests.hostile.parameters.elsewhere import OF_UPSTREAMS

TYPED = offered(
    {**FUNCTION, "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
)
FORGETS, SLIPS, QUOTES = "Forget.", "Slip.", "Quote."
SCRIBBLES = "Scribble."
EMBEDDINGS = "tests/live/test_embeddings.py"
POOL, REPAIR = "tests/pool/test_engine_models.py", "tests/live/test_repair.py"


@dataclass(frozen=True)
class Setting:
    given: Json
    asked: Json = field(default_factory=dict)
    """Of the model with the setting, and of the same model without it."""
    of: str = REPORTED


@dataclass(frozen=True)
class ReportedSetting:
    """A setting of a model, as the server reports it to the owner."""

    given: Json
    field: str
    value: Any
    of: str = REPORTED


def default(name: str) -> Setting:
    shown = SAMPLING[name]
    assert isinstance(shown, Case)
    unset = {name: None for name in ("temperature",) if name in shown.given}
    return Setting({"defaults": shown.given}, {**shown.base, **unset})


def repaired(name: str, text: str) -> Setting:
    return Setting({"repair": {name: False}}, asked(text, **TYPED), SAID)


OWNING: Mapping[type, Mapping[str, Setting | ReportedSetting | str]] = {
    settings.ModelSettings: {
        "source": Setting({"source": "replay:other.jsonl"}, asked(THINKS), SAID),
        "family": Setting({"family": "mistral"}, asked(THINKS), SAID),
        "chat_template": Setting({"chat_template": "other.jinja"}),
        "revision": "tests/sources/test_hub.py::test_a_revision_is_fetched_and_found_again",
        "aliases": ReportedSetting({"aliases": ["nick"]}, "aliases", ["nick"]),
        "context_length": Setting({"context_length": 64}, {"max_tokens": 100}),
        "tokenizer": Setting({"tokenizer": "checkpoint"}, asked(THINKS), SAID),
        "template_kwargs": Setting({"template_kwargs": {"color": "red"}}),
        "force_answer": Setting({"force_answer": False}, asked(FORGETS), SAID),
        "constrain_calls": Setting({"constrain_calls": True}, asked(QUOTES, **TYPED), SAID),
        "compute_ahead": "tests/generation/test_generate.py::test_the_owner_turns_it_off",
        "reasoning_tags": Setting({"reasoning_tags": ["scratchpad"]}, asked(SCRIBBLES), SAID),
        "task": f"{EMBEDDINGS}::test_they_are_those_of_a_plain_computation",
        "matryoshka": f"{EMBEDDINGS}::test_fewer_dimensions",
        "preload": f"{POOL}::test_preloading_begins_at_the_start_and_only_where_asked_for",
        "pinned": ReportedSetting({"pinned": True}, "pinned", True),
        "ttl": ReportedSetting({"ttl": 3600.0}, "ttl", 3600.0),
        "images": "tests/api/test_histories.py::test_the_owner_may_have_new_images_refused",
        "kv_bits": "tests/worker/test_quantized_kv.py::test_a_row_takes_half_the_memory_or_less",
        **OF_UPSTREAMS,
    },
    settings.RepairSettings: {
        "mistakes": repaired("mistakes", SLIPS),
        "retries": f"{REPAIR}::test_where_nobody_allows_it_the_answer_is_told_as_it_is",
        "loops": f"{REPAIR}::test_a_model_may_loop_where_its_owner_lets_it",
        "streaming": f"{REPAIR}::test_a_stream_that_is_held_back_is_mended",
    },
    settings.SamplingDefaults: {
        **{
            name: default(name)
            for name in settings.SamplingDefaults.__dataclass_fields__
            if name != "max_tokens"
        },
        "max_tokens": Setting(
            {"defaults": {"max_tokens": 3}}, asked(THINKS, max_tokens=None), SAID
        ),
    },
    settings.AdapterSettings: {
        "path": "tests/hostile/test_parameters.py::test_it_changes_the_answer",
        "description": "tests/live/test_adapters.py::test_they_are_described",
        "allow_other_base": "tests/models/test_adapter_catalog.py"
        "::test_another_base_needs_the_owners_word",
    },
}
