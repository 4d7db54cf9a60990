"""Golden cases: what a family's models write, and what must be found in it.

`scripts/golden` runs this file: it brings the rendered prompts up to date.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import yaml

from mlx_server.events import (
    BuiltInCall,
    Event,
    ReasoningDelta,
    Repaired,
    TextDelta,
    ToolCallDelta,
    ToolCallFinished,
    ToolCallStarted,
    Violation,
)
from mlx_server.families import family_named, family_of
from mlx_server.families.base import ModelFamily
from mlx_server.families.by_template import SAMPLED_TOOLS, read_back, samples_of
from mlx_server.families.json_families import PLAIN
from mlx_server.families.markup import MarkupFamily
from mlx_server.messages import Tool
from mlx_server.models.checkpoint import Checkpoint, read_checkpoint
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.parsers.parse_context import ParseContext, Parser, Section
from mlx_server.prompts.template_capabilities import template_capabilities
from mlx_server.requests import ALL_REPAIRS, RepairPolicy
from mlx_server.sources.replay_checkpoint import replay_checkpoint
from tests.families.prompts import checkpoint_folder, golden_prompts

SCHEMA_VARIABLES = ("response_format", "response_schema", "json_schema", "schema")
"""Variables in which templates look for the schema of an answer."""

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
"""Names that many templates read, as no tokenizer comes with a template."""


def probed(template: Path, named: str | None = None) -> str:
    """named: the family to be tried; without it, the one that would be chosen."""
    with TemporaryDirectory(prefix="probe-") as folder:
        path = replay_checkpoint(Path(folder), PLAIN)
        checkpoint = read_checkpoint(path, template.read_text("utf-8"))
        checkpoint = replace(checkpoint, tokens={**TOKENS, **checkpoint.tokens})
        family = family_named(named) if named else family_of(checkpoint)
        return "".join(f"{label}: {said}\n" for label, said in _lines(checkpoint, family))


def _lines(checkpoint: Checkpoint, family: ModelFamily) -> Iterator[tuple[str, str]]:
    assert checkpoint.template
    reads = checkpoint.template.reads
    samples = samples_of(checkpoint)
    yield "family", family.name
    yield "tools", "rendered" if {"tools", "xml_tools"} & reads else "not rendered"
    for sample in samples.calls:
        found = read_back(family, sample)
        what = "read back" if found.is_right else "NOT read back"
        left = f", and {found.text!r} is left" if found.text and found.is_right else ""
        mended = ", as a repair" if found.repairs else ""
        yield f"{len(sample.calls)} call(s)", f"{sample.written!r}: {what}{mended}{left}"
    if not samples.calls:
        yield "calls", "not rendered"
    elif isinstance(family, MarkupFamily):
        layout = family.layout_with(SAMPLED_TOOLS)
        held = any(notation.blocks for notation in layout.call_formats)
        yield "grammar of calls", "yes" if held else "none"
        yield "marks of calls", " ".join(layout.calls) or "none"
    yield "thoughts", " … ".join(samples.thoughts) if samples.thoughts else "no marks are rendered"
    capabilities = template_capabilities(checkpoint.template, checkpoint.tokens)
    yield "earlier thoughts", capabilities.reasoning
    schema = [name for name in SCHEMA_VARIABLES if name in reads]
    yield "schema of the answer", ", ".join(schema) or "the template has no place for it"


FOLDER = Path(__file__).parent / "golden"
Unit = tuple[int, str]
"""A token and the text it adds."""

NO_TOKEN = -1


class GoldenCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """Where the notation has one."""


class Reads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    reasoning: str = ""
    text: str = ""
    calls: list[GoldenCall] = msgspec.field(default_factory=list)
    unfinished: list[str] = msgspec.field(default_factory=list)
    """Names of calls that were begun and never finished."""
    repairs: list[str] = msgspec.field(default_factory=list)
    """What was mended, and where."""
    unmet: list[str] = msgspec.field(default_factory=list)
    """What of the tools' schemas is broken, and which calls were begun and are text."""
    commentary: str = ""
    """The part of the text that is no answer yet."""
    built_in: list[tuple[str, str]] = msgspec.field(default_factory=list)
    """Calls of tools that the request lacks: each tool, and what was written to it."""


class Golden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    output: str
    reads: Reads
    prompt_end: str = ""
    cut: bool = False
    held: bool = False
    """Whether calls are reported once they are complete, as where no grammar constrains them."""
    loose: bool = False
    """Whether the family's grammar does not write its calls in this form, or no text after them."""
    by_text: bool = True
    """Whether it reads the same in a vocabulary that has none of the control tokens."""


class Yaml(yaml.CSafeLoader):
    """A date and a bare `on` are the texts that they look like, as JSON has neither."""


Yaml.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if not tag.endswith((":timestamp", ":bool")) or first in "tTfF"
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@lru_cache
def tools() -> tuple[Tool, ...]:
    listed = yaml.load((FOLDER / "tools.yaml").read_text("utf-8"), Yaml)
    functions = [entry["function"] for entry in listed]
    return tuple(Tool(f["name"], f["description"], f["parameters"]) for f in functions)


def outputs_of(family: ModelFamily) -> Path:
    return FOLDER / family.name / "outputs.yaml"


def goldens_of(family: ModelFamily) -> tuple[Golden, ...]:
    return _goldens(outputs_of(family))


@cache
def _goldens(path: Path) -> tuple[Golden, ...]:
    if not path.is_file():
        return ()
    try:
        return msgspec.convert(yaml.load(path.read_text("utf-8"), Yaml), tuple[Golden, ...])
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from None


@lru_cache
def tokenizer_of(family_name: str) -> Tokenizer:
    return Tokenizer(checkpoint_folder(family_named(family_name)) / "tokenizer.json")


# Playing


@dataclass(frozen=True)
class Player:
    """One family's parser over one case, in several ways."""

    family: ModelFamily
    case: Golden
    repair: RepairPolicy = ALL_REPAIRS

    @property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.family.name)

    @property
    def reads_token_ids(self) -> bool:
        """No text without tokens means anything to such a family's parser."""
        return self.family.name == "gpt_oss"

    def ways(self) -> Iterator[tuple[str, list[Event]]]:
        yield "token by token", self.by_tokens()
        whole = len(self.case.output) + 1
        turn = whole % 4  # sizes between one and all differ from case to case
        for size in (1, (2, 3, 5, 8)[turn], whole):
            yield f"control tokens, and text cut at {size}", self.cut(size)
        if self.case.by_text and not self.reads_token_ids and self._has_control_tokens:
            for size in ((1, 4, 7)[turn % 3], whole):
                yield f"no control tokens, text cut at {size}", self.as_text(size)

    @property
    def _has_control_tokens(self) -> bool:
        """Otherwise it is cut in the same way whether they are known or not."""
        return any(text in self.case.output for text in self.tokenizer.control_tokens.values())

    def by_tokens(self) -> list[Event]:
        return self._heard(self.tokenizer.encode(self.case.output))

    def ended_after(self, tokens: int) -> list[Event]:
        """An answer that came to its limit there."""
        short = replace(self, case=msgspec.structs.replace(self.case, cut=True))
        return short._heard(self.tokenizer.encode(self.case.output)[:tokens])

    def cut(self, size: int) -> list[Event]:
        if self.reads_token_ids:
            pieces = (text for _, text in self._units(size))
            return self._heard(id for piece in pieces for id in self.tokenizer.encode(piece))
        units = ((token, "" if token >= 0 else text) for token, text in self._units(size))
        return self._played(self.tokenizer.control_tokens, units)

    def as_text(self, size: int) -> list[Event]:
        return self._played({}, ((NO_TOKEN, piece) for piece in _pieces(self.case.output, size)))

    def _units(self, size: int) -> Iterator[Unit]:
        """Control tokens whole, and pieces of the text between them."""
        control = {text: id for id, text in self.tokenizer.control_tokens.items()}
        longest_first = sorted(control, key=len, reverse=True)
        between = "|".join(map(re.escape, longest_first)) or "(?!)"
        for part in re.split(f"({between})", self.case.output):
            if part in control:
                yield control[part], part
            else:
                yield from ((NO_TOKEN, piece) for piece in _pieces(part, size))

    def _heard(self, ids: Iterable[int]) -> list[Event]:
        detokenizer = self.tokenizer.detokenizer()
        units = ((id, detokenizer.feed(id)) for id in ids)
        return self._played(self.tokenizer.control_tokens, units)

    def _played(self, control: dict[int, str], units: Iterable[Unit]) -> list[Event]:
        parser = self._parser(control)
        events = [event for token, text in units for event in parser.feed(token, text)]
        return events + parser.finish(cut=self.case.cut)

    def places(self) -> set[Section]:
        """Where its tokens are said to belong."""
        parser = self._parser(self.tokenizer.control_tokens)
        detokenizer = self.tokenizer.detokenizer()
        places = set()
        for id in self.tokenizer.encode(self.case.output):
            places.add(parser.section)
            parser.feed(id, detokenizer.feed(id))
        return places

    def _parser(self, control: dict[int, str]) -> Parser:
        end = self.case.prompt_end
        prompt = tuple(self.tokenizer.encode(end))
        context = ParseContext(0, tools(), prompt, end, control, self.repair, self.case.held)
        return self.family.make_parser(context)


def _pieces(text: str, size: int) -> Iterator[str]:
    return (text[at : at + size] for at in range(0, len(text), size))


# Reading what was played


def folded(events: Sequence[Event], offered: Sequence[Tool] = ()) -> Reads:
    """As a client sees it; what no client should ever see is an AssertionError.

    offered: the tools of the request; those of the golden cases, if none are given.
    """
    offered = offered or tools()
    names: dict[int, str] = {}
    ids: dict[int, str] = {}
    arguments: dict[int, str] = {}
    finished: list[int] = []
    for event in events:
        match event:
            case TextDelta(text=piece) | ReasoningDelta(text=piece):
                assert piece, f"an empty delta: {event}"
            case ToolCallStarted(_, call, id, name):
                assert call == len(names), f"{event} should be call {len(names)}"
                assert id, f"{event} has no id"
                assert id not in ids.values(), f"{event}: the id was used before"
                assert name in {tool.name for tool in offered}, f"{event}: no such tool"
                names[call], ids[call], arguments[call] = name, id, ""
            case ToolCallDelta(_, call, piece):
                assert call in names, f"{event} of a call that was not started"
                assert call not in finished, f"{event} of a call that is finished"
                assert piece, f"an empty delta: {event}"
                arguments[call] += piece
            case ToolCallFinished(_, call):
                assert call in names, f"{event} of a call that was not started"
                assert call not in finished, f"{event} of a call that is finished"
                finished.append(call)
    repairs = [e.where for e in events if isinstance(e, Repaired) and e.what == "json"]
    repaired = {n for n in finished if f"tool_calls[{n}].function.arguments" in repairs}
    return Reads(
        reasoning="".join(e.separated for e in events if isinstance(e, ReasoningDelta)),
        text="".join(e.separated for e in events if isinstance(e, TextDelta)),
        calls=[
            GoldenCall(names[n], _object(arguments[n], repeats=n in repaired), ids[n])
            for n in sorted(finished)
        ],
        unfinished=[name for number, name in names.items() if number not in finished],
        repairs=[f"{e.what} {e.where}" for e in events if isinstance(e, Repaired)],
        unmet=[e.what for e in events if isinstance(e, Violation)],
        commentary="".join(
            e.text for e in events if isinstance(e, TextDelta) and e.phase == "commentary"
        ),
        built_in=[(e.tool, e.text) for e in events if isinstance(e, BuiltInCall)],
    )


def _object(text: str, *, repeats: bool) -> dict[str, Any]:
    """repeats: whether a key may come twice, since a call that streams can't take back the first
    value."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        assert repeats or len(set(keys)) == len(keys), f"a key comes twice in {text!r}"
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=once)
    except ValueError as error:
        raise AssertionError(f"the arguments are no JSON, {error}: {text!r}") from None
    assert isinstance(found, dict), f"the arguments are no object: {text!r}"
    return found


def shown(reads: Reads, like: Reads) -> str:
    """To be compared: 5, 5.0 and true differ; ids count where `like` has them."""
    calls = [
        msgspec.structs.replace(call, id=call.id if wanted and wanted.id else None)
        for call, wanted in zip(
            reads.calls, [*like.calls, *[None] * len(reads.calls)], strict=False
        )
    ]
    plain = msgspec.to_builtins(msgspec.structs.replace(reads, calls=calls))
    return json.dumps(plain, indent=1, sort_keys=True, ensure_ascii=False)


# Bringing up to date


def up_to_date() -> Iterator[tuple[Path, str]]:
    """Every derived file, and what should be in it."""
    for golden in golden_prompts():
        yield golden.path, golden.text()


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="scripts/golden", add_help=False)
    options.add_argument("--check", action="store_true")
    options.add_argument("--family")
    options.add_argument("--probe", type=Path)
    given = options.parse_args(arguments)
    if given.probe:
        sys.stdout.write(probed(given.probe, given.family))
        return 0
    check = given.check
    changed = 0
    for path, wanted in up_to_date():
        old = path.read_text("utf-8") if path.is_file() else ""
        if old != wanted:
            changed += 1
            name = path.relative_to(FOLDER.parents[2]).as_posix()
            before, after = (text.splitlines(keepends=True) for text in (old, wanted))
            sys.stdout.writelines(difflib.unified_diff(before, after, name, name, n=1))
            if not check:
                path.write_text(wanted, "utf-8")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
