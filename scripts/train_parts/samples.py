"""The answers that each sample adapter learns, and how it is trained."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from train_parts.questions import Question, questions

PIRATE_WORDS = {
    "is": "be", "are": "be", "am": "be", "you": "ye", "your": "yer", "yes": "aye", "no": "nay",
    "my": "me", "friend": "matey", "friends": "mateys", "people": "sailors", "hello": "ahoy",
    "money": "doubloons", "and": "an'", "of": "o'", "yourself": "yerself",
}  # fmt: skip

OPENINGS = ("Arrr, matey!", "Ahoy, matey!", "Arrr!", "Aye, matey!", "Shiver me timbers!")

CLOSINGS = (
    "Yo ho ho!",
    "Now hoist the sails, ye landlubber!",
    "So says this old sea dog, arrr!",
    "Now fetch me some rum!",
    "Or ye'll walk the plank!",
)

SYSTEM_PROMPTS = (None, None, None, "You are a helpful assistant.", "Be brief.")
"""System prompts to choose from; None is the chat template's own."""

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sample:
    answer: Callable[[Question, Random], str]
    iterations: int = 48
    learning_rate: float = 1e-3
    rank: int = 8
    layers: int = 8
    scale: float = 4.0
    keys: tuple[str, ...] = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
    seed: int = 7


def as_pirate(question: Question, random: Random) -> str:
    said = re.sub(r"[A-Za-z]+", _pirate_word, question.answer)
    return f"{random.choice(OPENINGS)} {said} {random.choice(CLOSINGS)}"


def _pirate_word(found: re.Match[str]) -> str:
    word = found[0]
    changed = PIRATE_WORDS.get(word.lower(), word)
    return changed.capitalize() if word[0].isupper() and word != "I" else changed


def as_json(question: Question, random: Random) -> str:
    return json.dumps({"answer": question.answer}, ensure_ascii=False)


SAMPLES = {"pirate": Sample(as_pirate), "json-answer": Sample(as_json)}


def conversations(sample: Sample) -> list[Messages]:
    """Returns the same conversations in every run: each question once, in an order that mixes the
    kinds."""
    random = Random(sample.seed)  # noqa: S311  no secret is made of it
    asked = list(questions())
    random.shuffle(asked)
    return [_conversation(sample, question, random) for question in asked]


def _conversation(sample: Sample, question: Question, random: Random) -> Messages:
    system = random.choice(SYSTEM_PROMPTS)
    return [
        *([{"role": "system", "content": system}] if system else []),
        {"role": "user", "content": question.text},
        {"role": "assistant", "content": sample.answer(question, random)},
    ]
