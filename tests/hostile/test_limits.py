"""What is at a limit passes, and one more does not: the limits that no other test reaches."""

import ast
import asyncio
import json
import logging
import math
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import h11
import pytest
import tokenizers
from llguidance import LLMatcher, LLParserLimits
from mcp import types
from pydantic import ValidationError
from starlette.testclient import TestClient
from tokenizers import decoders, models, normalizers

from mlx_server import limits
from mlx_server.api import fields
from mlx_server.api.chat_completions.input import ChatBody
from mlx_server.api.completions import CompletionBody
from mlx_server.api.conversations import ConversationBody
from mlx_server.api.formats import JsonSchemaParam
from mlx_server.api.pool import Load
from mlx_server.api.responses.protocol import ResponsesBody
from mlx_server.api.responses.runs import Runs
from mlx_server.api.responses.tools import McpTool
from mlx_server.api.responses.web_socket import UnstoredContext
from mlx_server.engine.messages import Generate, Grammar, Thinking
from mlx_server.errors import AdapterInvalid, InvalidGrammar, ServerError
from mlx_server.fair_queue import FairQueue
from mlx_server.generation import rendering
from mlx_server.generation.review import turns_to_check
from mlx_server.grammars import arguments as argument_schemas
from mlx_server.grammars import formats, patterns
from mlx_server.grammars.arguments import variants_of
from mlx_server.grammars.check import check, measure
from mlx_server.grammars.check import written as written_schema
from mlx_server.grammars.compiler import BYTES, LIMITS, in_a_line
from mlx_server.grammars.grammar import unsupported_keywords
from mlx_server.grammars.view import View, resolved
from mlx_server.http import security, strict_json
from mlx_server.http.connections import SlowClientGuard, StrictConnection
from mlx_server.http.resumable import EventLog
from mlx_server.mcp.server import Lister, Listing, bound
from mlx_server.messages import Conversation, Message, Tool, memory_of
from mlx_server.models.checkpoint import check_architecture
from mlx_server.models.files import BadHeader, read_header_of
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.prompts.harmony.tools_text import SchemaReducer
from mlx_server.prompts.message_normalization import arguments_object
from mlx_server.requests import ChoiceFormat, GenerateRequest, McpServer, SamplingParams
from mlx_server.store import ItemRecord
from mlx_server.system import descriptors
from mlx_server.system.sandbox import template_child, template_messages
from mlx_server.system.sandbox.chat_template import ChatTemplate
from mlx_server.system.shared_budget import SharedBudget
from mlx_server.tool_parsers import model_json, source, values
from mlx_server.tool_parsers.model_json import Malformed, json_text
from mlx_server.tool_parsers.values import JSON
from mlx_server.worker.batch import Batch
from mlx_server.worker.constrained_decoding import grammar_compiler
from mlx_server.worker.constrained_decoding.vocabulary import UnusableVocabulary, Vocabulary
from mlx_server.worker.prefill.memory_tier import MemoryTier
from mlx_server.worker.rows import check_row
from tests.api import wire
from tests.api.wire import MODEL, Json, ScriptedEngine, error, ok
from tests.models import adapter_files as adapters
from tests.parsers.harmony.played import ids, parser
from tests.worker.prefill.test_memory_tier import filled, known

ROOT = Path(__file__).parents[2]
REFUSALS = (
    ServerError, ValidationError, ValueError, BadHeader, Malformed, UnusableVocabulary,
    h11.RemoteProtocolError,
)  # fmt: skip
HI = [{"role": "user", "content": "Hi"}]
ITEM = {"type": "message", "role": "user", "content": "Hi"}
MCP_SERVER = McpServer("a", url="http://a")


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    with wire.client(tiny_path, ScriptedEngine()) as client:
        yield client


def chat(**more: Any) -> None:
    ChatBody.model_validate({"model": MODEL, "messages": HI, **more})


def response(**more: Any) -> None:
    ResponsesBody.model_validate({"model": MODEL, "input": "Hi", **more})


def mcp(**more: Any) -> None:
    McpTool.model_validate({"type": "mcp", "server_label": "a", **more})


def keys(count: int) -> dict[str, str]:
    return {str(at): "x" for at in range(count)}


def padded(size: int) -> Json:
    return {"description": "x" * (size - len(json.dumps({"description": ""})))}


def tools_of_bytes(size: int) -> None:
    parts = [padded(size // 8)] * 7 + [padded(size - 7 * (size // 8))]
    formats.usable_tools([Tool(f"f{at}", "", part) for at, part in enumerate(parts)])


def prompt_text(size: int) -> None:
    def request(text: str) -> GenerateRequest:
        return GenerateRequest("m", (Conversation((Message("user", text),)),))

    prepared: Any = SimpleNamespace(id="m", context_length=1)
    rendering.check_text(prepared, request("x" * (size - memory_of(request("")))))


def nested(depth: int) -> Any:
    found: Any = {}
    for _ in range(depth):
        found = {"items": found}
    return found


def multiples(digits: int) -> None:
    half = digits // 2 - 1  # zeros at the end of a number cost nothing
    check(View({"properties": {"a": {"multipleOf": half}, "b": {"multipleOf": digits - half}}}))


def choices(count: int) -> bool:
    def counted(properties: int) -> Json:
        members: Json = {str(at): {} for at in range(properties)}
        return {"type": "object", "properties": members, "minProperties": 1}

    root = math.isqrt(count)
    others = [counted(1) for _ in range(count - root * root)]
    found = unsupported_keywords(View({"items": counted(root), "prefixItems": others}))
    return not any("too costly" in gap.why for gap in found)


def variant_members(count: int) -> bool:
    names = math.ceil(count / 10) - 1
    properties: Json = {str(at): {} for at in range(names)}
    options = [{"type": "object"}] * 10
    return len(variants_of({"type": "object", "properties": properties, "anyOf": options})) == 10


def refused(pattern: str) -> None:
    if why := patterns.excessive_part(pattern):
        raise InvalidGrammar(why)


def pattern_states(count: int) -> None:
    times = limits.PATTERN_REPEATS
    refused(f"x{{{times}}}" * (count // times) + "x" * (count % times))


def rules(count: int) -> None:
    names = "\n".join(f'a{at}: "x"' for at in range(1, count))
    formats.user_grammar_body(f"start: a1\n{names}")


def row(**more: Any) -> None:
    batch = SimpleNamespace(vocabulary=10, plays=False, encodes=False)
    check_row(Generate(1, "m", [1], 1, [], SamplingParams(), **more), cast(Batch, batch))


def thinking(*closes: int) -> None:
    marks = [b"x" * size for size in closes]
    row(thinking=Thinking(budget=1, inside=True, opens=[], closes=marks, end=[1]))


def call_depth(depth: int) -> None:
    for _ in values.value(source.complete_source("[" * depth + "]" * depth + " "), JSON):
        pass


def coerced_depth(levels: int) -> bool:
    root: Json = {str(at): {"$ref": f"#/{at + 1}"} for at in range(levels - 1)}
    root[str(levels - 1)] = {"type": "string"}
    return resolved(root["0"], View(root)) == {"type": "string"}


def coerced_parts(count: int) -> bool:
    schema: Json = {"allOf": [{"title": str(at)} for at in range(count - 1)]}
    return len(argument_schemas.parts_of(schema, View(schema))) == count


def repaired_json(steps: int) -> None:
    ends = len(model_json.ENDS.findall('{"a": 1,}'))
    room = -(-steps // ends) - len('{"a":1,}')
    model_json.loads(f'{{"a":{" " * room}1,}}')


def harmony_depth(levels: int) -> bool:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return "string" in json.dumps(SchemaReducer(schema).plain(schema))


def harmony_references(count: int) -> bool:
    properties = {str(at): {"$ref": "#/$defs/a"} for at in range(count)}
    root = {"properties": properties, "$defs": {"a": {"type": "string"}}}
    return all(SchemaReducer(root).plain(root)["properties"].values())


def harmony_header(tokens: int) -> bool:
    """One without an end: what is no header any more is shown."""
    reading = parser()
    written = [*ids("<|channel|>"), *ids("a") * (tokens - 1)]
    return not [event for token in written for event in reading.feed(token, "")]


def template_error(characters: int) -> bool:
    text = "x" * characters
    request = template_messages.RenderTemplate("{{ raise_exception(x) }}", {"x": text}, 1, 1)
    reply, _ = template_child.Templates().reply_to(request)
    return reply.refusal == text


def head_bytes(size: int) -> bool:
    """h11 refuses a head of more bytes as soon as it has them and no end of it."""
    connection = StrictConnection()
    connection.receive_data(b"GET / HTTP/1.1\r\nHost: localhost\r\na: ".ljust(size, b"x"))
    return connection.next_event() is h11.NEED_DATA


def arguments(items: int) -> bool:
    text = f"[{'1,' * (items - 1)}1]"
    return bool(arguments_object(text) != text)


def events(size: int) -> bool:
    log = EventLog(SharedBudget(1 << 40))
    log.add(b"x" * size)
    return not log.is_full


def remembered(count: int) -> bool:
    memory = UnstoredContext(SharedBudget(1 << 30))
    for at in range(count):
        memory.keep(str(at), [ItemRecord("i", b"x")])
    return len(memory.contexts) == count


def in_the_background(count: int) -> None:
    runs = Runs(cast(Any, None), 1)
    for at in range(count):
        runs.claim(cast(Any, SimpleNamespace(owner="", id=str(at), log=None)))


def listed(*tools: types.Tool) -> Listing:
    lister = Lister(MCP_SERVER)
    lister.add(types.ListToolsResult(tools=list(tools)))
    return lister.listing


def mcp_tool(name: str, size: int = 0) -> types.Tool:
    return types.Tool(name=name, description="x" * size, input_schema={})


def mcp_bytes(size: int) -> bool:
    around = listed(mcp_tool("a")).sizes["a"]
    return not listed(mcp_tool("a", size - around)).left_out


def of_all_servers(*sizes: list[int]) -> bool:
    listings = [Listing() for _ in sizes]
    for listing, of_tools in zip(listings, sizes, strict=True):
        for at, size in enumerate(of_tools):
            listing.sizes[str(at)], listing.tools[str(at)] = size, cast(Any, None)
    bound(listings)
    return not listings[-1].left_out


def cached_prompts(count: int) -> bool:
    cache = MemoryTier(1 << 30)
    filled(cache, *["m"] * count)
    return all(known(cache, "m", seed) for seed in range(count))


def weights_header(size: int) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(size.to_bytes(8, "little") + b"{}".ljust(size))
        file.flush()
        read_header_of(Path(file.name), limits.CHECKPOINT_HEADER_BYTES)


def vocabulary(count: int) -> bool:
    vocab = {str(at): at for at in range(count)}
    model = {"model": {"type": "BPE", "vocab": vocab}, "decoder": {"type": "ByteLevel"}}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(model))
        return len(Vocabulary(Path(folder), [])) == count


def adapter_config(size: int) -> None:
    """Numbers may have white space around them, and so may the whole file."""
    with tempfile.TemporaryDirectory() as folder:
        path = adapters.peft_adapter(Path(folder), adapters.peft_tensors())
        config = path / "adapter_config.json"
        config.write_text(config.read_text().ljust(size))
        adapters.read(path)


def adapter_rank(rank: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tensors = adapters.peft_tensors(rank=rank)
        adapters.read(adapters.peft_adapter(Path(folder), tensors, r=rank))


def replacement(step: str, replace: Callable[[str, str], object], growth: int) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    setattr(tokenizer, step, replace("a", "b" * growth))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        Tokenizer(Path(folder) / "tokenizer.json")


def socket_memory(size: int) -> bool:
    memory = UnstoredContext(Runs(cast(Any, None), 1).socket_memory)
    memory.keep("a", [ItemRecord("i", b"x")])
    memory.keep("b", [ItemRecord("i", b"x" * (size - 1))])
    return "b" in memory.contexts


def checks(count: int) -> bool:
    async def all_at_once() -> bool:
        turns = turns_to_check("a client of this test")
        async with asyncio.timeout(0.1):
            for _ in range(count):
                await turns.acquire()
        return True

    try:
        return asyncio.run(all_at_once())
    except TimeoutError:
        return False


def remembered_clients(clients: int) -> bool:
    queue = FairQueue()
    for client in range(clients):
        queue.charge(str(client), 1)
    queue.advance(0)
    return all(queue.time(str(client)) for client in range(clients))


def whole_grammar_rules(count: int) -> bool:
    source = "start: a1\n" + "".join(f'a{at}: "x"\n' for at in range(1, count))
    try:
        grammar_compiler.compiled(Grammar(source), cast(Any, None))
    except grammar_compiler.GrammarRefused as refusal:
        return "rules" not in str(refusal)
    except AttributeError:  # it went on to the vocabulary
        return True
    return True


CASES: dict[str, Callable[[int], object]] = {
    "HEAD_BYTES": head_bytes,
    "SOCKET_RESPONSES": remembered,
    "JSON_DEPTH": lambda n: strict_json.parse(b"[" * n + b"]" * n),
    "JSON_DIGITS": lambda n: strict_json.parse(b"9" * n),
    "NAME_CHARACTERS": lambda n: JsonSchemaParam.model_validate({"schema": {}, "name": "x" * n}),
    "ANSWERS": lambda n: chat(n=n),
    "PROMPTS": lambda n: CompletionBody.model_validate({"model": MODEL, "prompt": ["Hi"] * n}),
    "STOP_STRINGS": lambda n: chat(stop=["x"] * n),
    "STOP_CHARACTERS": lambda n: chat(stop="x" * n),
    "LOGIT_BIASES": lambda n: chat(logit_bias=dict.fromkeys(keys(n), 1.0)),
    "TOP_LOGPROBS": lambda n: chat(top_logprobs=n, logprobs=True),
    "METADATA": lambda n: response(metadata=keys(n)),
    "METADATA_KEY_CHARACTERS": lambda n: response(metadata={"k" * n: "x"}),
    "METADATA_VALUE_CHARACTERS": lambda n: response(metadata={"k": "x" * n}),
    "LABEL_CHARACTERS": lambda n: response(user="x" * n),
    "ADAPTER_PATH_CHARACTERS": lambda n: Load(lora_name="a", lora_path="x" * n),
    "ADDED_ITEMS": lambda n: ConversationBody.model_validate({"items": [ITEM] * n}),
    "TOOLS": lambda n: chat(tools=[{"type": "function", "function": {"name": "f"}}] * n),
    "RESPONSE_TOOLS": lambda n: response(tools=[{"type": "function", "name": "f"}] * n),
    "TOOL_SCHEMA_BYTES": tools_of_bytes,
    "MCP_LABEL_CHARACTERS": lambda n: mcp(server_label="x" * n),
    "MCP_URL_CHARACTERS": lambda n: mcp(server_url="http://a/".ljust(n, "x")),
    "MCP_HEADERS": lambda n: mcp(headers=keys(n)),
    "MCP_FILTER_NAMES": lambda n: mcp(allowed_tools=["x"] * n),
    "PROMPT_TEXT_BYTES": prompt_text,
    "ARGUMENT_ITEMS": arguments,
    "ERROR_CHARACTERS": template_error,
    "TEMPLATE_SOURCE": lambda n: ChatTemplate("x" * n),
    "SCHEMA_BYTES": lambda n: written_schema(padded(n)),
    "SCHEMA_DEPTH": lambda n: measure(nested(n)),
    "SCHEMA_NODES": lambda n: measure({"default": [[]] * (n - 2)}),
    "SCHEMA_PROPERTIES": lambda n: check(View({"properties": {key: {} for key in keys(n)}})),
    "SCHEMA_VALUES": lambda n: check(View({"enum": list(range(n))})),
    "SCHEMA_COUNT": lambda n: check(View({"minItems": n})),
    "SCHEMA_TEXT_LENGTH": lambda n: check(View({"maxLength": n})),
    "SCHEMA_MULTIPLES": multiples,
    "SCHEMA_JOINED_PATTERNS": lambda n: (
        not unsupported_keywords(View({"allOf": [{"pattern": "a"}] * n}))
    ),
    "SCHEMA_CHOICES": choices,
    "SCHEMA_VARIANTS": lambda n: (
        len(variants_of({"type": "object", "anyOf": [{"type": "object"}] * n})) == n
    ),
    "SCHEMA_VARIANT_MEMBERS": variant_members,
    "PATTERN_CHARACTERS": lambda n: refused("x" * n),
    "PATTERN_REPEATS": lambda n: refused(f"x{{{n}}}"),
    "PATTERN_STATES": pattern_states,
    "PATTERN_DEPTH": lambda n: refused("(" * n + "x" + ")" * n),
    "CHOICES": lambda n: formats.check(ChoiceFormat(tuple(keys(n))), "choice"),
    "CHOICE_CHARACTERS": lambda n: formats.check(ChoiceFormat(("x" * (n - 1), "y")), "choice"),
    "GRAMMAR_CHARACTERS": lambda n: formats.user_grammar_body('start: "x"'.ljust(n)),
    "GRAMMAR_RULES": rules,
    "GRAMMAR_INTERSECTIONS": lambda n: formats.user_grammar_body("start: /a/" + " & /a/" * n),
    "GRAMMAR_DEPTH": lambda n: formats.user_grammar_body(f'start: {"(" * n}"x"{")" * n}'),
    "WHOLE_GRAMMAR_CHARACTERS": lambda n: row(grammar=Grammar("x" * n)),
    "QUOTED_ERROR_CHARACTERS": lambda n: in_a_line("x" * n) == "x" * n,
    "CALL_DEPTH": call_depth,
    "READ_JSON_CHARACTERS": lambda n: json_text(f'"{"x" * (n - 2)}"') is not None,
    "REPAIRED_JSON_STEPS": repaired_json,
    "COERCED_DEPTH": coerced_depth,
    "COERCED_PARTS": coerced_parts,
    "HARMONY_DEPTH": harmony_depth,
    "HARMONY_REFERENCES": harmony_references,
    "HARMONY_HEADER_TOKENS": harmony_header,
    "REASONING_DELIMITERS": lambda n: thinking(*[1] * n),
    "REASONING_DELIMITER_TOKENS": lambda n: thinking(n),
    "MCP_TOOLS": lambda n: not listed(*map(mcp_tool, keys(n))).left_out,
    "MCP_SCHEMA_BYTES": mcp_bytes,
    "MCP_ALL_TOOLS": lambda n: of_all_servers([1] * (n // 2), [1] * (n - n // 2)),
    "MCP_ALL_SCHEMA_BYTES": lambda n: of_all_servers([n // 2], [n - n // 2]),
    "TOOL_NAME_CHARACTERS": lambda n: not listed(mcp_tool("x" * n)).left_out,
    "BACKGROUND_RESPONSES": in_the_background,
    "STREAM_LOG_BYTES": events,
    "CHECKPOINT_LAYERS": lambda n: check_architecture(
        {"model_type": "llama", "num_hidden_layers": n}, "m"
    ),
    "CHECKPOINT_HEADER_BYTES": weights_header,
    "CACHED_PROMPTS": cached_prompts,
    "NORMALIZER_GROWTH": partial(replacement, "normalizer", normalizers.Replace),
    "DECODER_GROWTH": partial(replacement, "decoder", decoders.Replace),
    "VOCABULARY_TOKENS": vocabulary,
    "ADAPTER_CONFIG_BYTES": adapter_config,
    "ADAPTER_RANK": adapter_rank,
    "SOCKETS_MEMORY_BYTES": socket_memory,
    "CHECK_PROCESSES": checks,
    "REMEMBERED_CLIENTS": remembered_clients,
    "WHOLE_GRAMMAR_RULES": whole_grammar_rules,
}

LOWERED = {
    "CACHED_PROMPTS": 3,
    "CHECKPOINT_HEADER_BYTES": 100,
    "REPAIRED_JSON_STEPS": 999,
    "VOCABULARY_TOKENS": 300,
    "SOCKETS_MEMORY_BYTES": 100,
    "CHECK_PROCESSES": 3,
    "REMEMBERED_CLIENTS": 5,
    "WHOLE_GRAMMAR_RULES": 5,
}
"""Limits that would be slow to reach."""


@pytest.mark.parametrize("name", CASES)
def test_what_is_within_passes_and_one_more_does_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in LOWERED:
        monkeypatch.setattr(limits, name, LOWERED[name])
    most = getattr(limits, name)
    assert CASES[name](most) is not False
    assert not _passes(CASES[name], most + 1)


def _passes(ask: Callable[[int], object], size: int) -> bool:
    try:
        return ask(size) is not False
    except REFUSALS:
        return False


def test_connections_are_so_many_where_there_are_descriptors_for_them() -> None:
    most, of_one = limits.CONNECTIONS, limits.CONNECTIONS_PER_ADDRESS
    assert descriptors.connections(2 * most - 2) == most - 1
    assert descriptors.connections(2 * most) == descriptors.connections(4 * most) == most
    assert descriptors.connections_per_address(most) == of_one
    assert descriptors.connections_per_address(2 * most) == of_one


def test_a_page(client: TestClient) -> None:
    id = ok(client.post("/v1/conversations", json={}))["id"]
    path = f"/v1/conversations/{id}/items"
    ok(client.get(path, params={"limit": limits.PAGE_ITEMS}))
    error(client.get(path, params={"limit": limits.PAGE_ITEMS + 1}))


def test_a_body_of_the_largest_size(client: TestClient) -> None:
    def sent(size: int) -> Any:
        body = json.dumps({"model": MODEL, "messages": 5}).encode().ljust(size)
        return client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )

    error(sent(limits.BODY_BYTES), 400)
    error(sent(limits.BODY_BYTES + 1), 413)


@pytest.mark.parametrize("more", [0, 1])
def test_a_request_id(client: TestClient, more: int) -> None:
    sent = "x" * (limits.REQUEST_ID_CHARACTERS + more)
    got = client.get("/health", headers={"x-request-id": sent}).headers["x-request-id"]
    assert (got == sent) == (not more)
    assert security.REQUEST_ID.fullmatch(got)


def test_a_long_name_in_an_error(client: TestClient) -> None:
    body = {"model": MODEL, "input": "Hi", "metadata": {"k" * 1000: 5}}
    refusal = error(client.post("/v1/responses", json=body), 400)
    assert len(refusal["param"]) <= limits.WRONG_FIELD_CHARACTERS
    assert len(refusal["message"]) <= limits.FIELD_ERROR_CHARACTERS


def test_the_kernel_keeps_little_of_an_answer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = Mock()
        transport.get_extra_info.return_value = ours
        SlowClientGuard().connection_made(transport)
        kept = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert kept in (limits.SEND_BUFFER_BYTES, 2 * limits.SEND_BUFFER_BYTES)


def test_fields_without_a_meaning() -> None:
    many: Json = {f"f{at:04}": 1 for at in range(limits.IGNORED_NAMES + 5)}
    body = ChatBody.model_validate({"model": MODEL, "messages": HI, **many})
    assert len(list(body.ignored())) == limits.IGNORED_NAMES
    reported = fields.ignored_header(["x" * 1000])[fields.IGNORED_HEADER]
    assert len(reported) == limits.IGNORED_NAME_CHARACTERS
    reported = fields.ignored_header(many)[fields.IGNORED_HEADER]
    assert len(reported) == limits.IGNORED_HEADER_CHARACTERS


def test_no_cache_by_an_argument_is_without_a_bound() -> None:
    unbounded = [
        f"{path}: {node.name}"
        for path in (ROOT / "mlx_server").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.args.args
        for decorator in map(ast.unparse, node.decorator_list)
        if decorator in ("cache", "functools.cache") or "maxsize=None" in decorator
    ]
    assert unbounded == []


def test_the_page_of_limits_is_printed_from_them() -> None:
    page = (ROOT / ".github" / "LIMITS.md").read_text()
    assert page == limits.markdown(), "run `python -m mlx_server.limits > .github/LIMITS.md`"


AMBIGUOUS = 'start: s\ns: "a" | s s | s s s\n'
EXPRESSION = "start: /(a|b)*a(a|b){8}/\n"
OF_GRAMMARS = {
    "GRAMMAR_ITEMS_IN_ROW": ("max_items_in_row", AMBIGUOUS, 20),
    "GRAMMAR_STEP_ITEMS": ("step_max_items", AMBIGUOUS, 5),
    "GRAMMAR_FIRST_STEPS": ("initial_lexer_fuel", EXPRESSION, 5),
    "GRAMMAR_STEPS": ("step_lexer_fuel", EXPRESSION, 5),
    "GRAMMAR_STATES": ("max_lexer_states", EXPRESSION, 5),
    "GRAMMAR_SIZE": ("max_grammar_size", AMBIGUOUS, 5),
}


@pytest.mark.parametrize("name", OF_GRAMMARS)
def test_what_a_grammar_may_cost(name: str) -> None:
    field, source, low = OF_GRAMMARS[name]
    fields = [field for field, *_ in OF_GRAMMARS.values()]
    ours = LIMITS
    assert getattr(ours, field) == getattr(limits, name)
    lowered = LLParserLimits(**{each: getattr(ours, each) for each in fields} | {field: low})
    assert goes_on(source, ours)
    assert not goes_on(source, lowered)


@pytest.mark.parametrize(
    "repeated", ["(ab|aab|aaab|abb|b)+", "a*", "(a|aa)+", ".*", "a{900}", r"(\w+\s?)*"]
)
def test_an_expression_that_repeats_what_repeats_takes_few_steps(repeated: str) -> None:
    """They are a twentieth of those that end a row, so such an expression holds its request for
    milliseconds. With the 200,000 tokens of gpt-oss each takes at most 3,800 steps for a token."""
    few = LLParserLimits(step_lexer_fuel=limits.GRAMMAR_STEPS // 20, max_lexer_states=2000)
    assert goes_on(f"start: /({repeated})*c{{900}}/\n", few)


def goes_on(source: str, parser_limits: LLParserLimits) -> bool:
    matcher = LLMatcher(BYTES, source, log_level=0, limits=parser_limits)
    for byte in b"aaabaabb":
        if matcher.is_error():
            return False
        mask = matcher.compute_bitmask()
        if mask[byte >> 3] >> (byte & 7) & 1:
            matcher.consume_token(byte)
    return not matcher.is_error()


def test_the_header_of_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapters.peft_adapter(tmp_path / "a", adapters.peft_tensors())
    (weights,) = path.glob("*.safetensors")
    size = int.from_bytes(weights.read_bytes()[:8], "little")
    monkeypatch.setattr(limits, "ADAPTER_HEADER_BYTES", size)
    adapters.read(path)
    monkeypatch.setattr(limits, "ADAPTER_HEADER_BYTES", size - 1)
    with pytest.raises(AdapterInvalid):
        adapters.read(path)


def test_the_parts_of_a_logged_path(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    logged = []
    for parts in (limits.LOGGED_PATH_PARTS - 1, 10 * limits.LOGGED_PATH_PARTS):
        caplog.clear()
        with caplog.at_level(logging.INFO, "mlx_server.access"):
            client.get("/v1" + "/models" * (parts - 1))
        (record,) = caplog.records
        logged += re.findall(r"/v1\S*", record.getMessage())
    few, many = logged
    assert few == "/v1" + "/models" * (limits.LOGGED_PATH_PARTS - 2)
    assert many.count("/") <= limits.LOGGED_PATH_PARTS
    assert many.endswith("/*")
