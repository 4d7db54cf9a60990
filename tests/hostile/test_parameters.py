"""Nothing that is asked for is silently dropped: each parameter, by an answer that it changes."""

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from mlx_server.api import native
from mlx_server.api.completions import CompletionBody
from mlx_server.api.fields import ContinuationBody, GenerationBody, SamplingBody, ThinkingBody
from mlx_server.api.formats import ConstrainedBody
from mlx_server.api.responses.input import select_tools
from mlx_server.api.responses.protocol import ResponsesBody, new_response
from mlx_server.config.models_yaml import spec_named
from mlx_server.models.adapter_catalog import AdapterLocation
from mlx_server.pool.prepare import prepare
from mlx_server.requests import ALL_TOOLS, NO_TOOLS, McpServer
from mlx_server.sources.replay_checkpoint import TEMPLATE
from tests.hostile.fuzz import posted
from tests.hostile.parameters import (
    CHATTING,
    ELSEWHERE,
    EMBEDDING,
    MESSAGING,
    OLLAMAS,
    OWNING,
    RANKING,
    RESPONDING,
    TOKENIZING,
)
from tests.hostile.parameters.case import (
    ADAPTER,
    CALLS,
    CHAT,
    COMPLETIONS,
    DEAF,
    MESSAGES,
    NATIVE,
    REPORTED,
    RESPONSES,
    SAID,
    SHORTEST,
    THINKS,
    Case,
    Json,
    Reply,
    whole,
)
from tests.hostile.parameters.owning import (
    FORGETS,
    QUOTES,
    SCRIBBLES,
    SLIPS,
    ReportedSetting,
    Setting,
)
from tests.hostile.routes import ROUTES
from tests.live.server import LiveServer, serving
from tests.worker.lora_files import mlx_adapter

Wire = type[BaseModel]

REPOSITORY = Path(__file__).parents[2]
SHOWN: Mapping[type, Mapping[str, Any]] = {
    **CHATTING,
    **MESSAGING,
    **OLLAMAS,
    **RESPONDING,
    **OWNING,
    **ELSEWHERE,
    **TOKENIZING,
    **EMBEDDING,
    **RANKING,
}
ROOTS: tuple[Wire, ...] = tuple(route.wire_type for route in ROUTES)

PATHS: Mapping[Wire, tuple[str, ...]] = {
    SamplingBody: (CHAT, COMPLETIONS, NATIVE, RESPONSES, MESSAGES),
    GenerationBody: (CHAT, COMPLETIONS),
    ConstrainedBody: (CHAT, COMPLETIONS),
    ThinkingBody: (CHAT, RESPONSES),
    ContinuationBody: (CHAT, NATIVE),
    CompletionBody: (COMPLETIONS,),
    native.NativeBody: (NATIVE,),
    native.NativeTool: (NATIVE,),
}
"""Where it is asked for; else as the tables say in their first lines."""

SEES_ALL = (
    TEMPLATE
    + """\
{%- for message in messages %}{{ message.role }} {{ message.name }}{% endfor %}
{{- color }}{{ reasoning_effort }}"""
)

DEAF_TO_TOOLS = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


THOUGHT = "<think>\nLet me see, step by step.\n</think>\n\n"
TRANSCRIPT = (
    {"match": THINKS, "output": f"{THOUGHT}It is so."},
    {"match": CALLS, "output": f"{THOUGHT}{call('f', '{}')}\n{call('f', '{}')}"},
    {"match": FORGETS, "output": "<think>\nSo be it.<|im_end|>It is so."},
    {"match": SLIPS, "output": call("f", "{'a': 1,}")},
    {"match": QUOTES, "output": call("f", '{"a": "1"}'), "off_grammar": "noise"},
    {"match": SCRIBBLES, "output": "<scratchpad>Hm.</scratchpad>It is so."},
    {"output": "Yes."},
)


def models(tiny: Path, adapter: Path) -> dict[str, Json]:
    """Those without a setting; and one with each."""
    bare: dict[str, Json] = {
        REPORTED: {
            "source": str(tiny),
            "chat_template": "sees_all.jinja",
            "adapters": {ADAPTER: str(adapter)},
        },
        SAID: {"source": "replay:said.jsonl", "family": "qwen3"},
        DEAF: {"source": str(tiny), "chat_template": "deaf.jinja"},
    }
    found = {
        f"{wire.__name__}.{name}": {**bare[setting.of], **setting.given}
        for wire, name, setting in shown(Setting | ReportedSetting)
    }
    everything: dict[str, Json] = json.loads(json.dumps({**bare, **found}))
    return everything  # without references, which models.yaml does not have


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("parameters")
    (folder / "checkpoint").symlink_to(tiny_path)
    (folder / "sees_all.jinja").write_text(SEES_ALL, "utf-8")
    (folder / "other.jinja").write_text("{{ messages }}", "utf-8")
    (folder / "deaf.jinja").write_text(DEAF_TO_TOOLS, "utf-8")
    (folder / "said.jsonl").write_text("\n".join(map(json.dumps, TRANSCRIPT)), "utf-8")
    (folder / "other.jsonl").write_text('{"output": "No."}', "utf-8")
    adapter = mlx_adapter(folder / "odd", tiny_path)
    with serving(folder, {"models": models(tiny_path, adapter)}) as server:
        yield server


def shown(kind: Any) -> Iterator[tuple[type, str, Any]]:
    for wire, entries in SHOWN.items():
        for name, entry in entries.items():
            if isinstance(entry, kind):
                yield wire, name, entry


def paths(wire: type) -> tuple[str, ...]:
    own = (CHAT,) if wire in CHATTING else (MESSAGES,) if wire in MESSAGING else (RESPONSES,)
    return PATHS.get(wire, own)


@dataclass
class Asking:
    server: LiveServer
    known: dict[str, Reply] = field(default_factory=dict)

    def ask(self, path: str, body: Json) -> Reply:
        answer = posted(self.server, path, json.dumps({**SHORTEST[path], **body}).encode())
        if answer.kind == "application/json":
            return Reply(answer.status, answer.kind, answer.ignored, json.loads(answer.content))
        events = answer.content.decode().split("\n\n")[:-2]
        reported = [json.loads(event.partition("data: ")[2]) for event in events]
        return Reply(answer.status, answer.kind, answer.ignored, reported)

    def without(self, path: str, body: Json) -> Reply:
        """What the same question gets each time: what differs from it does not by chance."""
        key = json.dumps([path, body])
        if key not in self.known:
            self.known[key], again = self.ask(path, body), self.ask(path, body)
            assert whole(self.known[key]) == whole(again)
        return self.known[key]


@pytest.fixture(scope="module")
def asking(server: LiveServer) -> Asking:
    return Asking(server)


@pytest.mark.parametrize(
    ("path", "case"),
    [
        pytest.param(path, case, id=f"{wire.__name__}.{name} {path}")
        for at, (wire, name, case) in enumerate(shown(Case))
        for path in [paths(wire)[at % len(paths(wire))]]  # what several read alike, in turn
    ],
)
def test_it_changes_the_answer(asking: Asking, path: str, case: Case) -> None:
    without = asking.without(path, case.base)
    assert without.status == case.before, without.body
    given = asking.ask(path, {**case.base, **case.given})
    assert given.status == case.status, given.body
    assert case.sees(given) != case.sees(without)


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        pytest.param(f"{wire.__name__}.{name}", setting, id=f"{wire.__name__}.{name}")
        for wire, name, setting in shown(Setting)
    ],
)
def test_it_changes_the_answer_of_its_model(asking: Asking, model: str, setting: Setting) -> None:
    without = asking.without(CHAT, {**setting.asked, "model": setting.of})
    given = asking.ask(CHAT, {**setting.asked, "model": model})
    assert (without.status, given.status) == (200, 200), (without.body, given.body)
    assert nameless(given) != nameless(without)


def nameless(reply: Reply) -> Any:
    """But for the model's own."""
    return {name: value for name, value in whole(reply)[-1].items() if name != "model"}


@pytest.mark.parametrize(
    ("name", "reported"),
    [pytest.param(name, reported, id=name) for _, name, reported in shown(ReportedSetting)],
)
def test_it_is_shown_with_its_model(
    server: LiveServer, name: str, reported: ReportedSetting
) -> None:
    with server.http() as http:
        found = {model["id"]: model for model in http.get("/v1/pool").json()["models"]}
    assert (
        found[f"ModelSettings.{name}"][reported.field]
        == reported.value
        != found[reported.of][reported.field]
    )


@pytest.mark.parametrize("setting", [None, "allow_other_base"])
def test_an_adapter_is_kept_as_its_owner_says(
    tmp_path: Path, tiny_path: Path, setting: str | None
) -> None:
    said = {setting: True} if setting else {}
    adapters = {ADAPTER: {"path": str(tmp_path), **said}}
    models = {REPORTED: {"source": str(tiny_path), "adapters": adapters}}
    config = tmp_path / "models.yaml"
    config.write_text(json.dumps({"models": models}))
    made = prepare(spec_named(config, REPORTED), lambda *progress: None, upcast=True)
    assert made.adapters
    assert made.adapters.locations()[ADAPTER] == AdapterLocation(tmp_path, **said)


SERVER: Json = {"type": "mcp", "server_label": "docs"}
URL: Json = {
    **SERVER,
    "server_url": "https://example.com/mcp",
    "headers": {"x-key": "k"},
    "authorization": "token",
    "server_description": "All of it.",
}
CONNECTOR: Json = {**SERVER, "connector_id": "mine"}


def test_a_server_is_what_was_asked_for() -> None:
    for tool, server in (
        (URL, {"url": URL["server_url"], "headers": {"x-key": "k"}, "authorization": "token"}),
        (CONNECTOR, {"connector": "mine"}),
    ):
        body = ResponsesBody.model_validate({**SHORTEST[RESPONSES], "tools": [tool]})
        assert select_tools(body, listed=()).servers == (
            McpServer(
                "docs",
                **server,
                always_approve=ALL_TOOLS,
                never_approve=NO_TOOLS,
                param="tools[0]",
            ),
        )
        (reported,) = new_response(body, "resp_1", stored=False)["tools"]
        assert reported == {k: v for k, v in tool.items() if k not in ("headers", "authorization")}


@pytest.mark.parametrize(
    "test", sorted({test for _, _, test in shown(str)}), ids=lambda test: test.rpartition("::")[2]
)
def test_the_test_that_shows_it_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in functions(file)


@cache
def functions(file: str) -> set[str]:
    found = ast.walk(ast.parse((REPOSITORY / file).read_text("utf-8")))
    return {each.name for each in found if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_parameter_is_shown() -> None:
    there_are = {(wire, name) for root in ROOTS for wire, name in parameters(root)}
    assert {(wire, name) for wire, names in SHOWN.items() for name in names} >= there_are


@pytest.mark.parametrize("record", [each for each in SHOWN if is_dataclass(each)])
def test_every_setting_is_shown(record: Any) -> None:
    inside = {"adapters", "capabilities", "defaults", "distributed", "repair", "upstream"}
    names = {each.name for each in fields(record) if not each.metadata}
    assert names - inside == set(SHOWN[record])


def test_there_are_parameters_everywhere() -> None:
    """Or the one before would show nothing."""
    counts = [len(set(parameters(root))) for root in ROOTS if root.model_fields]
    assert min(counts) >= 1
    assert len({each for root in ROOTS for each in parameters(root)}) > 180


def parameters(root: Wire) -> Iterator[tuple[Wire, str]]:
    """All that is in it: but not what only holds others, or says of which kind something is."""
    for wire in walk(root):
        for name in vars(wire).get("__annotations__", ()):
            found = wire.model_fields.get(name)
            if found and not is_kind(name, found.annotation) and not only_holds(found.annotation):
                yield wire, name


def walk(root: Wire) -> Iterator[Wire]:
    for wire in root.__mro__:
        if issubclass(wire, BaseModel):
            yield wire
    for each in root.model_fields.values():
        for inner in inside(each.annotation):
            yield from walk(inner)


def is_kind(name: str, annotation: Any) -> bool:
    return name == "type" and get_origin(annotation) is Literal


def only_holds(annotation: Any) -> bool:
    found = [member for member in members(annotation) if member is not NoneType]
    return all(any(inside(member)) for member in found)


def members(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from members(each)
    else:
        yield annotation


def inside(annotation: Any) -> Iterator[Wire]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from inside(each)
