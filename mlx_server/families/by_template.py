"""Recognises a family by parsing the calls that the chat template renders.

A template that renders calls shows the format that the model was trained on, whatever its model
type is. So a family that can't parse them is the wrong one. The model gets a family that can, or
one with a call format made from the template.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mlx_server.events import folded
from mlx_server.families.base import ModelFamily
from mlx_server.families.learned import (
    SAMPLED_TOOLS,
    CallSample,
    TemplateSamples,
    learned_formats,
    template_samples,
)
from mlx_server.families.markup import MarkupFamily
from mlx_server.models.checkpoint import Checkpoint
from mlx_server.parsers.markup_parser import MarkupLayout
from mlx_server.parsers.parse_context import ParseContext

log = logging.getLogger("mlx_server.families")

LEARNED = "from_template"
"""The name of families that are made from a template."""


@dataclass(frozen=True)
class ReadBack:
    """The result of parsing a sample with a family's parser."""

    is_right: bool
    """Whether the calls are those of the sample."""
    text: str
    """The text that is left next to the calls."""
    repairs: frozenset[str]
    """The kinds of repairs that the parser made."""


def read_back(family: ModelFamily, sample: CallSample) -> ReadBack:
    parser = family.make_parser(ParseContext(tools=SAMPLED_TOOLS))
    events = [*parser.feed(-1, sample.written), *parser.finish(cut=False)]
    answer = folded(events)
    calls = [(call.name, "".join(call.arguments)) for call in answer.begun_calls.values()]
    return ReadBack(
        is_right=calls == [(name, _json(arguments)) for name, arguments in sample.calls],
        text=answer.text.strip(),
        repairs=frozenset(repair.what for repair in answer.repairs),
    )


def _json(arguments: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{key}": "{value}"' for key, value in arguments.items()) + "}"


def samples_of(checkpoint: Checkpoint) -> TemplateSamples:
    template = checkpoint.tool_template or checkpoint.template
    return template_samples(template, checkpoint.tokens) if template else TemplateSamples()


def confirmed(
    found: ModelFamily, plain: MarkupFamily, families: Iterable[ModelFamily], checkpoint: Checkpoint
) -> ModelFamily:
    """The family `found` if it parses the calls of the checkpoint's template; else another family
    that does, or one made from the template. If there is none, it is `found`."""
    samples = samples_of(checkpoint)
    if not isinstance(found, MarkupFamily) or not samples.calls:
        return found
    if reads(found, samples.calls) or reads(found, samples.named or samples.calls):
        return found
    others = [f for f in families if isinstance(f, MarkupFamily) and f is not found]
    source = checkpoint.template_source
    is_readable = found is not plain and reads_all(found, samples.calls, repaired=True)
    if is_readable and _is_told(found, samples, source):
        return found
    # of equal formats the most general: Hermes', then one that no marker ties to other templates
    others.sort(key=lambda family: (family.name != "hermes", not family.is_marked(source)))
    chosen = next(_readers(others, samples), None)
    if chosen is None and is_readable:
        return found  # a template's slips in its own format make no other format
    chosen = chosen or learned(plain, samples)
    chosen = chosen or next((other for other in others if reads(other, samples.calls[:1])), None)
    if chosen is None or reads(found, samples.calls[:1]):
        return found
    log.info(
        "the chat template writes calls in the format of the family %s, not of %s: it is read",
        *(chosen.name, found.name),
    )
    return chosen if chosen.name == LEARNED else _with_thoughts(chosen, samples)


def _readers(families: Sequence[MarkupFamily], samples: TemplateSamples) -> Iterator[MarkupFamily]:
    for calls in filter(None, (samples.calls, samples.named)):
        yield from (family for family in families if reads_all(family, calls))


def reads(family: ModelFamily, samples: Sequence[CallSample], *, repaired: bool = False) -> bool:
    """Whether the family parses the samples. repaired: it may do so with any repair."""
    allowed = {"unmarked"} if family.name == "plain" else set[str]()
    readings = (read_back(family, sample) for sample in samples)
    return all(
        reading.is_right and (repaired or reading.repairs <= allowed) for reading in readings
    )


def _is_told(family: ModelFamily, samples: TemplateSamples, template: str) -> bool:
    """Whether the template asks for the family's calls in words, and renders earlier ones as bare
    JSON, as vLLM's template for Phi-4-mini does."""
    is_bare = all(sample.written.lstrip().startswith(("{", "[")) for sample in samples.calls)
    delimiters = family.call_delimiters(SAMPLED_TOOLS)
    return is_bare and any(len(each) > 1 and each in template for each in delimiters)


def reads_all(
    family: ModelFamily, samples: Sequence[CallSample], *, repaired: bool = False
) -> bool:
    """Whether the family parses the samples and leaves no text of them."""
    return reads(family, samples, repaired=repaired) and not any(
        sample.is_whole and read_back(family, sample).text for sample in samples
    )


def learned(plain: MarkupFamily, samples: TemplateSamples) -> MarkupFamily | None:
    """A family with a call format made from the template's samples; None if none can be made."""
    for call_format in learned_formats(samples.calls):
        layout = MarkupLayout(call_formats=(call_format,))
        family = _with_thoughts(replace(plain, name=LEARNED, layout=layout), samples)
        # checked with other ids too, since an id may have been taken for part of a delimiter
        if all(reads_all(family, calls) for calls in (samples.calls, samples.named)):
            return family
    return None


def _with_thoughts(family: MarkupFamily, samples: TemplateSamples) -> MarkupFamily:
    """The family, with the reasoning delimiters that the template writes if it lacks them."""
    pair, layout = samples.thoughts, family.layout
    if pair is None or not isinstance(layout, MarkupLayout):
        return family
    if any(pair[0] in opening for opening in layout.opens_reasoning):
        return family
    reasoning = (pair, *layout.reasoning)
    return replace(family, layout=replace(layout, reasoning=reasoning), answer_prefix=pair[1])
