"""The tokens that a checkpoint's small files add to its tokenizer.json, as transformers adds them.

Most folders list them in tokenizer_config.json, as `added_tokens_decoder`. In older ones
special_tokens_map.json names them, and added_tokens.json has those of a fine-tune.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from mlx_server.models.files import read_optional_json

MAP, ADDED = "special_tokens_map.json", "added_tokens.json"

STANDARD = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
EXTRA, ADDITIONAL = "extra_special_tokens", "additional_special_tokens"
"""Keys of further special tokens, in a list or by names of their own; the second is the older."""

NUMBER, SURROGATE = re.compile(r"[0-9]{1,9}"), re.compile(r"[\ud800-\udfff]")

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class SpecialTokens:
    named: Mapping[str, AddedToken]
    """By the names under which chat templates know them, such as `bos_token`."""
    further: tuple[AddedToken, ...]
    listed: Mapping[int, AddedToken]
    """By numbers that give their order: a tokenizer gives each its next free id."""
    is_legacy: bool = False
    """Whether the flags in tokenizer.json count rather than the listed ones."""

    @property
    def texts(self) -> dict[str, str]:
        return {name: token.content for name, token in self.named.items()}

    def missing_from(self, own: Mapping[int, AddedToken]) -> list[AddedToken]:
        """Those that a tokenizer with these added tokens lacks, or has with other flags."""
        by_id = {**self.listed, **own} if self.is_legacy else self.listed
        listed = [by_id[id] for id in sorted(by_id)]
        present = {token.content for token in (*listed, *own.values())}
        others = {
            token.content: token
            for token in (*self.named.values(), *self.further)
            if token.content not in present
        }
        names = {token.content for token in self.named.values()}
        wanted = [
            AddedToken(token.content, **{**flags_of(token), "special": True})
            if token.content in names
            else token
            for token in (*listed, *others.values())
        ]
        have = {token.content: flags_of(token) for token in own.values()}
        return [token for token in wanted if have.get(token.content) != flags_of(token)]


def read_special_tokens(folder: Path, tokenizer_config: Mapping[str, Any]) -> SpecialTokens:
    config = dict(tokenizer_config)
    if not config.get(EXTRA):
        config[EXTRA] = config.get(ADDITIONAL)
    if isinstance(listed := config.get("added_tokens_decoder"), dict):
        numbered = {int(id): _token(it) for id, it in listed.items() if NUMBER.fullmatch(id)}
        by_id = {id: token for id, token in numbered.items() if token}
        return SpecialTokens(_named(config), _further(config), by_id)
    older = read_optional_json(folder / MAP)
    lists = [each[EXTRA] for each in (config, older) if isinstance(each.get(EXTRA), list)]
    config |= older | ({EXTRA: [token for each in lists for token in each]} if lists else {})
    named, further = _named(config), _further(config)
    special = {token.content for name, token in named.items() if name in STANDARD}
    special |= {token.content for token in further}
    added = {
        id: token
        for text, id in read_optional_json(folder / ADDED).items()
        if type(id) is int and (token := _token(text, special=text in special))
    }
    if not further:
        further = _tokens(older.get(ADDITIONAL))
    return SpecialTokens(named, further, added, is_legacy=True)


def _named(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    named = {name: found for name, found in config.items() if name.endswith("_token")}
    named |= extra if isinstance(extra := config.get(EXTRA), dict) else {}
    tokens = {name: _token(found, special=True) for name, found in named.items()}
    return {name: token for name, token in tokens.items() if token}


def _further(config: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    return _tokens(config.get(EXTRA))


def _tokens(listed: object) -> tuple[AddedToken, ...]:
    found: Iterable[object] = listed if isinstance(listed, list) else ()
    return tuple(token for each in found if (token := _token(each, special=True)))


def _token(found: object, **flags: bool) -> AddedToken | None:
    """A token given as its text, or as an object with its flags; None if it is neither."""
    if isinstance(found, dict):
        given = {name: found.get(name) for name in FLAGS}
        flags |= {name: value for name, value in given.items() if isinstance(value, bool)}
        found = found.get("content")
    if not isinstance(found, str) or not found or SURROGATE.search(found):
        return None
    return AddedToken(found, **flags)


def flags_of(token: AddedToken) -> dict[str, bool]:
    return {name: getattr(token, name) for name in FLAGS}
