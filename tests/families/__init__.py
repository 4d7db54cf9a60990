"""Small tokenizers and checkpoints, made to be difficult."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from mlx_server.models.checkpoint import Checkpoint, read_checkpoint

CONTROL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "[INST]", "[/INST]", "<s>")

SAMPLES = (
    "Hello, world!\n\n  Two spaces.\tA tab.",
    "Übergrößenträger, naïve façade, žluťoučký kůň",
    "Съешь же ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "いろはにほへと ちりぬるを 天地玄黃",
    "키스의 고유조건은 입술끼리 만나야 하고",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "עטלף אבק נס דרך מזגן שהתפוצץ",
    "ऋषियों को सताने वाले दुष्ट राक्षसों",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇺🇳 ❤️‍🔥 🧑🏿‍🚀",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𒀀 e\u0301 a\u030a\u0323",
)


def byte_level(*control: str | AddedToken) -> tokenizers.Tokenizer:
    """GPT-2's way, with merges that cut across characters."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(SAMPLES, trainer)
    made.add_tokens(_added(*control))
    return made


def byte_fallback(*control: str | AddedToken) -> tokenizers.Tokenizer:
    """SentencePiece's way, as Llama 2 has it: spaces as ▁, unknown characters as bytes."""
    letters = sorted(set("".join(SAMPLES[:3])) - set(" \n\t"))
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    merges = [("▁", "H"), ("l", "l"), ("▁H", "e"), ("▁", "w"), ("o", "r")]
    pieces += [left + right for left, right in merges]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_tokens(_added(*control))
    return made


def full_width(*control: str | AddedToken) -> tokenizers.Tokenizer:
    """A normalizer that makes control tokens of characters that look like theirs."""
    made = byte_level(*control)
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return made


def _added(*control: str | AddedToken) -> list[AddedToken]:
    return [
        AddedToken(token, special=True, normalized=False) if isinstance(token, str) else token
        for token in control or CONTROL
    ]


def write_checkpoint(
    folder: Path, tokenizer: tokenizers.Tokenizer, **files: Mapping[str, Any]
) -> Path:
    """Everything but the weights; `files` by their names without .json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {"config": {"model_type": "tiny"}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder


def checkpoint(folder: Path, tokenizer: tokenizers.Tokenizer, template: str) -> Checkpoint:
    return read_checkpoint(write_checkpoint(folder, tokenizer), template)
