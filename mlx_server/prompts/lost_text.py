"""Finds the messages whose text a rendered prompt lacks.

What a template renders is known from samples (see template_capabilities.py), but no sample shows
what it does with every conversation. So each prompt is searched for the messages that it was made
of. Templates trim, escape and edit texts: one counts as lost only if most of its words are missing.
"""

import json
import re
from collections.abc import Iterator, Sequence

from mlx_server.messages import Message
from mlx_server.prompts.history_rendering import Escape
from mlx_server.prompts.message_normalization import THINK_DELIMITERS

EXCERPT = 200
"""Characters of a text that are looked for, since a template drops a text as a whole."""

NEAR = 4096
"""Characters of a prompt after a message within which the next one is looked for as it is."""

WORDS = 3
"""Words of an edited text that are looked for, the longest ones."""

EDITED = 64
"""Texts of a conversation that are looked for in every way, which takes longest."""

PLAIN = re.compile(r"[^\W_][\w ]{11,60}")
"""Matches a piece of text that no template edits, and that no other text has by chance."""

SWITCH = re.compile(r"/(?:no_?)?think\b")
"""Matches what a user switches thinking with, which templates take out of the text."""

WORD = re.compile(r"\w+")


def lost_texts(messages: Sequence[Message], prompt: str, escaped: Escape) -> Iterator[int]:
    """Yields the indices of messages whose text is not in the prompt, which is marked text."""
    at = near = edited = 0
    for i, message in enumerate(messages):
        near += len(message.content) + NEAR
        # most texts are found at once, in their order, so that a long prompt is read once
        text = _beginning(message.content)
        if text and (place := prompt.find(text, at, near)) >= 0:
            at, near = place, place + len(message.content)
            continue
        if not (text := _sought(message)):
            continue
        plain = PLAIN.search(text)
        place = prompt.find(plain[0], at) if plain else -1
        if place < 0 and edited <= EDITED:
            place = _place(prompt, escaped(text), at)
        if place >= 0:
            at, near = place, place + len(message.content)
            continue
        edited += 1
        if edited > EDITED or not _has_words(prompt, text, escaped):
            yield i


def _sought(message: Message) -> str:
    """Returns the beginning of the text; of an assistant's, of what follows its reasoning."""
    text = message.content
    if message.role == "assistant":
        for _, end in THINK_DELIMITERS:
            text = text[text.rfind(end) + len(end) :] if end in text else text
    return _beginning(text)


def _beginning(text: str) -> str:
    return text[: 2 * EXCERPT].strip()[:EXCERPT]


def _place(prompt: str, text: str, at: int) -> int:
    """Returns a place of the text, as it is or as JSON; -1 if there is none."""
    for form in _forms(text):
        place = prompt.find(form, at)
        if place >= 0 or (place := prompt.find(form)) >= 0:
            return place
    return -1


def _forms(text: str) -> Iterator[str]:
    """Yields the text, followed by JSON of it."""
    yield text
    for is_ascii in (False, True):
        if (form := json.dumps(text, ensure_ascii=is_ascii)[1:-1]) != text:
            yield form


def _has_words(prompt: str, text: str, escaped: Escape) -> bool:
    """Whether the prompt has most of a text's words, by their length: short ones are everywhere."""
    if not (said := SWITCH.sub(" ", text).strip()):
        return True
    words = sorted(WORD.findall(said) or [said], key=len)[-WORDS:]
    forms = [{*_forms(word), *_forms(escaped(word))} for word in words]
    found = (
        word for word, each in zip(words, forms, strict=True) if any(f in prompt for f in each)
    )
    return 2 * sum(map(len, found)) >= sum(map(len, words))
