"""Converts SentencePiece's tokenizer.model, which its own library reads, to a tokenizer."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2 as sentencepiece
from tokenizers import AddedToken, decoders, models, normalizers, processors

from mlx_server.errors import ModelUnusable
from mlx_server.models.files import read_own

SPACE = "▁"

Proto = Any
"""A message of SentencePiece, whose classes have no type annotations."""


def sentencepiece_tokenizer(
    file: Path, tokenizer_config: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """Raises ModelUnusable."""
    proto = _read_proto(file)
    tokenizer = tokenizers.Tokenizer(_model(proto, file))
    if steps := list(_normalizers(proto)):
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *_strip(proto)]
    )
    tokenizer.add_tokens(_control_tokens(proto))
    begins, name = _bos_token(proto, tokenizer_config)
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{name}:0 $A:0",
            pair=f"{name}:0 $A:0 $B:1",
            special_tokens=[(name, tokenizer.token_to_id(name))],
        )
    return tokenizer


def _read_proto(file: Path) -> Proto:
    proto: Proto = sentencepiece.ModelProto()
    try:
        proto.ParseFromString(read_own(file))
    except DecodeError:
        raise _unusable(file, "is not a SentencePiece model") from None
    if not proto.pieces:
        raise _unusable(file, "has no tokens")
    return proto


def _model(proto: Proto, file: Path) -> Any:
    kinds, kind = sentencepiece.TrainerSpec, proto.trainer_spec.model_type
    fallback = bool(proto.trainer_spec.byte_fallback)
    unknown = [i for i, piece in enumerate(proto.pieces) if piece.type == piece.UNKNOWN]
    if len(unknown) != 1:
        raise _unusable(file, "does not have exactly one unknown token")
    if kind == kinds.UNIGRAM:
        scored = [(piece.piece, piece.score) for piece in proto.pieces]
        return models.Unigram(scored, unknown[0], fallback)
    if kind == kinds.BPE:
        vocabulary = {piece.piece: id for id, piece in enumerate(proto.pieces)}
        name = proto.pieces[unknown[0]].piece
        return models.BPE(
            vocabulary, _merges(proto), unk_token=name, fuse_unk=True, byte_fallback=fallback
        )
    raise _unusable(file, "is neither a BPE nor a Unigram model")


def _merges(proto: Proto) -> list[tuple[str, str]]:
    """All pairs of tokens that merge to a third one, in the order of its score, best first."""
    ranks = {p.piece: (-p.score, id) for id, p in enumerate(proto.pieces) if p.type == p.NORMAL}
    cuts = (
        (rank, ranks[left], ranks[right], left, right)
        for piece, rank in ranks.items()
        for at in range(1, len(piece))
        if (left := piece[:at]) in ranks and (right := piece[at:]) in ranks
    )
    return [(left, right) for *_, left, right in sorted(cuts)]


def _normalizers(proto: Proto) -> Iterator[Any]:
    spec = proto.normalizer_spec
    if spec.precompiled_charsmap:
        yield normalizers.Precompiled(spec.precompiled_charsmap)
    if spec.remove_extra_whitespaces:
        yield normalizers.Strip()
        yield normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    if spec.add_dummy_prefix:
        yield normalizers.Prepend(" ")
    yield normalizers.Replace(" ", SPACE)


def _strip(proto: Proto) -> list[Any]:
    return [decoders.Strip(" ", 1, 0)] if proto.normalizer_spec.add_dummy_prefix else []


def _control_tokens(proto: Proto) -> list[AddedToken]:
    return [
        # user-defined tokens are matched in the normalized text
        AddedToken(p.piece, special=p.type != p.USER_DEFINED, normalized=p.type == p.USER_DEFINED)
        for p in proto.pieces
        if p.type in (p.CONTROL, p.UNKNOWN, p.USER_DEFINED)
    ]


def _bos_token(proto: Proto, tokenizer_config: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether texts begin with a BOS token, and the token."""
    named = proto.trainer_spec.bos_piece or "<s>"
    llama = str(tokenizer_config.get("tokenizer_class", "")).startswith("Llama")
    adds_bos = tokenizer_config.get("add_bos_token", llama) is True
    return adds_bos and named in {piece.piece for piece in proto.pieces}, named


def _unusable(file: Path, what: str) -> ModelUnusable:
    return ModelUnusable(f"{file.name} {what}. Use a checkpoint with a tokenizer.json.")
