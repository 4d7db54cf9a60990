"""Prompts for the text between a prefix and a suffix (fill in the middle).

The delimiters that a model was trained with show in its vocabulary, and so does their order: see
`FORMATS`. They are control tokens, so a client's text never becomes one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_server.models.checkpoint import Checkpoint
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.prompts.control_token_guard import text_tokens
from mlx_server.prompts.template_prompt import RenderedPrompt
from mlx_server.requests import Infill


@dataclass(frozen=True)
class InfillFormat:
    prefix: str
    suffix: str
    middle: str | None
    """None: the model writes the middle right after the prefix."""
    suffix_first: bool = False
    names_file_in_prefix: bool = False
    """Whether the name of the file stands after the delimiter of the prefix, and not before it."""


FORMATS = (
    # Qwen 2.5 Coder and 3, Granite 4, CodeGemma, and others that have adopted them
    InfillFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder and StarCoder 2, Granite Code, Stable Code
    InfillFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>", names_file_in_prefix=True),
    InfillFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    InfillFormat("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
    # Seed-Coder
    InfillFormat("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    InfillFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    InfillFormat("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon H1 Tiny Coder
    InfillFormat("<|plamo:fim_prefix|>", "<|plamo:fim_suffix|>", "<|plamo:fim_middle|>"),
    InfillFormat("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
"""As their publishers document them. Which one counts is found from the vocabulary, since any model
may have any name."""

REPOSITORIES: Mapping[str, str] = {"<|repo_name|>": "\n", "<repo_name>": "", "<reponame>": ""}
"""The delimiters of a repository's name, and what follows the name."""

FILES = (
    "<|file_sep|>",
    "<file_sep>",
    "<|file_separator|>",
    "<filename>",
    "<|plamo:file_separator|>",
)
"""The delimiters before each file's name, one of which a model may have."""

ENDS = ("<|endoftext|>", "<|end_of_text|>", "▁<EOT>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>")
"""Tokens that end a middle, which need not end an answer of the same model."""

REPOSITORY, CURRENT_FILE = "myproject", "filename"
"""The names, which no client sends, that llama.cpp's server gives them."""

ANSWER_TOKENS = 512
"""The room that further files leave for the middle."""

LEAD = "☺"
"""A character that no tokenizer joins to what follows it."""


@dataclass(frozen=True)
class InfillTokens:
    """The delimiters as one vocabulary has them."""

    format: InfillFormat
    ids: Mapping[str, int]

    def first_of(self, *names: str) -> str | None:
        return next((name for name in names if name in self.ids), None)

    @property
    def stops(self) -> frozenset[int]:
        """The tokens that end the middle: it has no delimiters, and no further file."""
        own = (self.format.prefix, self.format.suffix, self.format.middle or "")
        ends = (*own, *REPOSITORIES, *FILES, *ENDS)
        return frozenset(self.ids[token] for token in ends if token in self.ids)


def infill_tokens_of(tokenizer: Tokenizer) -> InfillTokens | None:
    """None if the model can't insert text before a suffix."""
    ids = {text: id for id, text in tokenizer.control_tokens.items()}
    for each in FORMATS:
        if {each.prefix, each.suffix, each.middle or each.prefix} <= ids.keys():
            return InfillTokens(each, ids)
    return None


def infill_prompt(
    checkpoint: Checkpoint, tokens: InfillTokens, infill: Infill, most: int
) -> RenderedPrompt:
    """The prompt, with as many of the last further files as fit into `most` tokens. Raises
    ContextTooLong early if it is longer without any."""
    form, ids = tokens.format, tokens.ids
    separator = tokens.first_of(*FILES) if infill.files else None
    names, name = [], f"{CURRENT_FILE}\n" if separator else ""
    begin: list[int] = []
    if separator:
        if repository := tokens.first_of(*REPOSITORIES):
            begin = [ids[repository]]
            begin += text_tokens(checkpoint, REPOSITORY + REPOSITORIES[repository])
        names = [ids[separator]]
        if not form.names_file_in_prefix:
            names, name = names + text_tokens(checkpoint, name), ""
    suffix = _inner_tokens(checkpoint, infill.suffix, most)
    prefix = text_tokens(checkpoint, name + infill.prefix, most)
    room = most - ANSWER_TOKENS - len(begin) - len(names) - len(prefix) - len(suffix)
    before = [ids[separator]] if separator else []
    ends = "\n\n" if not separator else "" if form.names_file_in_prefix else "\n"
    strip = "\n" if ends else ""
    texts = [f"{file.name}\n{file.text.removesuffix(strip)}{ends}" for file in infill.files]
    files, left_out = _files(checkpoint, texts, before, room)
    if separator:
        begin += files
    else:  # they are the beginning of the current file
        prefix = files + prefix
    halves = [[ids[form.prefix], *prefix], [ids[form.suffix], *suffix]]
    first, second = reversed(halves) if form.suffix_first else halves
    end = [ids[form.middle]] if form.middle else []
    prompt = [*begin, *names, *first, *second, *end]
    return RenderedPrompt(checkpoint.tokenizer.with_special_tokens(prompt), left_out)


def _files(
    checkpoint: Checkpoint, files: Sequence[str], before: Sequence[int], room: int
) -> tuple[list[int], tuple[str, ...]]:
    """The tokens of the last files that fit, each after the tokens `before`, and the client's name
    for the files if some do not fit."""
    tokens: list[int] = []
    for file in reversed(files):
        own = text_tokens(checkpoint, file)
        tokens = [*before, *own, *tokens]
        if len(tokens) > room:
            return tokens[len(before) + len(own) :], ("input_extra",)
    return tokens, ()


def _inner_tokens(checkpoint: Checkpoint, text: str, most: int) -> list[int]:
    """The tokens of a text as it stands within a line: some tokenizers put a space in front of
    every text."""
    tokenizer = checkpoint.tokenizer
    if not tokenizer.spelling(tokenizer.encode("x")[0]).startswith(" "):
        return text_tokens(checkpoint, text, most)
    return text_tokens(checkpoint, LEAD + text, most)[len(tokenizer.encode(LEAD)) :]
