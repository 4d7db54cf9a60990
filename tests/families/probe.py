"""How a chat template of no known family is understood: `scripts/golden --probe TEMPLATE.jinja`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_server.families import family_named, family_of
from mlx_server.families.base import ModelFamily
from mlx_server.families.by_template import SAMPLED_TOOLS, read_back, samples_of
from mlx_server.families.json_families import PLAIN
from mlx_server.families.markup import MarkupFamily
from mlx_server.models.checkpoint import Checkpoint, read_checkpoint
from mlx_server.prompts.template_capabilities import template_capabilities
from mlx_server.sources.replay_checkpoint import replay_checkpoint

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
