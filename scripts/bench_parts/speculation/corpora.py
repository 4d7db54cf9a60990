"""Prompts with answers that are given: edits by real commits of this repository, copies with edits,
quotes of tools' results, JSON by schemas, tool calls, prose and new code."""

import difflib
import json
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

COMMITS, CHANGED, LINES = 60, 40, range(40, 351)
"""How many commits are taken, the most lines that each changes, and the lines of its file."""
LOGGED = 1200

Json = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    prompt: str
    answer: str
    schema: Json | None = None
    """That of the answer, if a grammar holds it to one."""


@dataclass(frozen=True)
class Edit:
    path: str
    old: str
    new: str

    @property
    def hunks(self) -> list[tuple[str, str]]:
        """The changed lines before and after, with two lines around them."""
        old, new = self.old.splitlines(), self.new.splitlines()
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        return [
            ("\n".join(old[group[0][1] : group[-1][2]]), "\n".join(new[group[0][3] : group[-1][4]]))
            for group in matcher.get_grouped_opcodes(2)
        ]


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def edits() -> list[Edit]:
    """Changes of few lines to one file of the package, by their hashes: a new commit changes at
    most two of them."""
    commits = sorted(_git("log", "--no-merges", "--format=%H", f"-{LOGGED}").split())
    found = list[Edit]()
    for commit in commits:
        stat = _git("show", "--numstat", "--format=", "--diff-filter=M", commit)
        fields = [line.split("\t") for line in stat.splitlines() if line.strip()]
        paths = [
            path
            for added, deleted, path in fields
            if path.endswith(".py") and 1 <= int(added) + int(deleted) <= CHANGED
        ]
        if not paths:
            continue
        path = random.Random(commit).choice(paths)  # noqa: S311
        edit = Edit(path, _git("show", f"{commit}^:{path}"), _git("show", f"{commit}:{path}"))
        if edit.old.count("\n") in LINES and edit.new:
            found.append(edit)
        if len(found) == COMMITS:
            break
    return found


def _ask(edit: Edit) -> str:
    return f"Here is {edit.path}:\n```python\n{edit.old}\n```\nMake the change, keep the rest.\n"


def _call(edit: Edit, old: str, new: str) -> str:
    arguments = {"file_path": edit.path, "old_string": old, "new_string": new}
    call = json.dumps({"name": "edit", "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def whole_files() -> list[Sample]:
    return [Sample(_ask(edit), f"```python\n{edit.new}\n```") for edit in edits()]


def edit_calls() -> list[Sample]:
    """Calls whose arguments are written as they are."""
    return [
        Sample(
            _ask(edit),
            "\n".join(
                f"<tool_call>\n<function=edit>\n<parameter=file_path>\n{edit.path}\n</parameter>\n"
                f"<parameter=old_string>\n{old}\n</parameter>\n<parameter=new_string>\n{new}\n"
                "</parameter>\n</function>\n</tool_call>"
                for old, new in edit.hunks
            ),
        )
        for edit in edits()
    ]


def json_edit_calls() -> list[Sample]:
    """Calls whose arguments are JSON, of a file with line numbers."""
    return [
        Sample(
            "<tool_response>\n"
            + "".join(f"{n:6d}\t{line}\n" for n, line in enumerate(edit.old.splitlines(), 1))
            + "</tool_response>\n",
            "\n".join(_call(edit, old, new) for old, new in edit.hunks),
        )
        for edit in edits()
    ]


def diffs() -> list[Sample]:
    return [
        Sample(
            _ask(edit),
            "".join(
                difflib.unified_diff(
                    edit.old.splitlines(keepends=True),
                    edit.new.splitlines(keepends=True),
                    f"a/{edit.path}",
                    f"b/{edit.path}",
                )
            ),
        )
        for edit in edits()
    ]


def new_code() -> list[Sample]:
    return [Sample("Write this module:\n", edit.new[:3000]) for edit in edits()]


WORDS = [
    *("however", "moreover", "quickly", "several", "important", "system", "answer", "number"),
    *("report", "window", "garden", "second", "little", "bright", "simple", "careful"),
]
PARAGRAPH, TEXT_CHARACTERS = 205, 300


def _paragraphs() -> list[str]:
    text = "".join(
        (ROOT / name).read_text("utf-8") for name in ("README.md", "mlx_server/worker/README.md")
    )
    parts = [part.replace("\n", " ") for part in re.split(r"\n\n+", text)]
    return [part for part in parts if len(part) > TEXT_CHARACTERS and not set("|`") & {*part[:1]}]


def prose() -> list[Sample]:
    """Paragraphs after those before them."""
    words = " ".join(_paragraphs()).split()
    step = 2 * PARAGRAPH
    return [
        Sample(" ".join(words[at : at + step]), " " + " ".join(words[at + step : at + 2 * step]))
        for at in range(0, len(words) - 2 * step, PARAGRAPH)
    ][:16]


def copies(edited: int = 8, count: int = 20) -> list[Sample]:
    """Texts of about 300 tokens, of which so many words are replaced, added or left out."""
    rng = random.Random(5)  # noqa: S311
    parts = _paragraphs()
    rng.shuffle(parts)
    words = " ".join(parts).split()
    return [_copy(words[at:], edited, rng) for at in _starts(len(words), count)]


def _starts(words: int, count: int) -> Iterator[int]:
    at = 0
    for _ in range(count):
        yield at
        at = (at + PARAGRAPH) % (words - PARAGRAPH - 5)


def _copy(words: list[str], edited: int, rng: random.Random) -> Sample:
    old = words[:PARAGRAPH]
    new = [*old]
    for _ in range(edited):
        at, kind = rng.randrange(5, len(new) - 5), rng.randrange(3)
        new[at : at + (kind != 1)] = [] if kind == 2 else [rng.choice(WORDS)]
    ask = f"Correct this text and write it again:\n\n{' '.join(old)}\n\n"
    return Sample(ask, " ".join(new))


def quotes() -> list[Sample]:
    return [Sample(f"<tool_response>\n{prompt}", answer) for prompt, answer in QUOTED]


def by_schema() -> list[Sample]:
    return [
        Sample(f"Answer by this JSON schema: {json.dumps(schema)}\n", json.dumps(value), schema)
        for schema, value in SCHEMAS
    ]


def tool_calls() -> list[Sample]:
    calls = [_call_schema(name, properties) for name, properties, _ in TOOLS]
    tools = "\n".join(
        json.dumps(
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": "",
                    "parameters": {"type": "object", "properties": properties},
                },
            }
        )
        for name, properties, _ in TOOLS
    )
    return [
        Sample(
            f"# Tools\n{tools}\n",
            json.dumps({"name": name, "arguments": arguments}),
            {"anyOf": calls},
        )
        for name, _, arguments in TOOLS
    ]


def _object(properties: Json) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _call_schema(name: str, properties: Json) -> Json:
    return _object({"name": {"const": name}, "arguments": _object(properties)})


TEXT, INTEGER, NUMBER, FLAG = (
    {"type": name} for name in ("string", "integer", "number", "boolean")
)

TEXTS: Json = {"type": "array", "items": TEXT}

ORDER = _object(
    {
        "customer_identifier": TEXT,
        "shipping_address_line_1": TEXT,
        "postal_code": TEXT,
        "total_amount_in_cents": INTEGER,
        "is_gift_wrapped": FLAG,
        "preferred_delivery_window": {"enum": ["morning", "afternoon", "evening"]},
    }
)

SCHEMAS: list[tuple[Json, Json]] = [
    (
        ORDER,
        {
            "customer_identifier": "C-20391",
            "shipping_address_line_1": "14 Harbour Street",
            "postal_code": "9012",
            "total_amount_in_cents": 12950,
            "is_gift_wrapped": False,
            "preferred_delivery_window": "evening",
        },
    ),
    (
        _object({"orders": {"type": "array", "items": ORDER}}),
        {
            "orders": [
                {
                    "customer_identifier": "C-20391",
                    "shipping_address_line_1": "14 Harbour Street",
                    "postal_code": "9012",
                    "total_amount_in_cents": 2590,
                    "is_gift_wrapped": False,
                    "preferred_delivery_window": "morning",
                },
                {
                    "customer_identifier": "C-20468",
                    "shipping_address_line_1": "2 Mill Lane",
                    "postal_code": "9043",
                    "total_amount_in_cents": 3885,
                    "is_gift_wrapped": True,
                    "preferred_delivery_window": "afternoon",
                },
                {
                    "customer_identifier": "C-20545",
                    "shipping_address_line_1": "Rue de la Gare 8",
                    "postal_code": "9074",
                    "total_amount_in_cents": 5180,
                    "is_gift_wrapped": False,
                    "preferred_delivery_window": "evening",
                },
                {
                    "customer_identifier": "C-20622",
                    "shipping_address_line_1": "Am Markt 3",
                    "postal_code": "9105",
                    "total_amount_in_cents": 6475,
                    "is_gift_wrapped": True,
                    "preferred_delivery_window": "morning",
                },
                {
                    "customer_identifier": "C-20699",
                    "shipping_address_line_1": "77 Sunset Blvd",
                    "postal_code": "9136",
                    "total_amount_in_cents": 7770,
                    "is_gift_wrapped": False,
                    "preferred_delivery_window": "afternoon",
                },
            ]
        },
    ),
    (
        _object(
            {
                "sentiment": {"enum": ["positive", "negative", "neutral"]},
                "confidence_score": NUMBER,
                "explanation": TEXT,
                "detected_topics": TEXTS,
            }
        ),
        {
            "sentiment": "negative",
            "confidence_score": 0.87,
            "explanation": (
                "The customer waited three weeks for the parcel and got no answer from support, "
                "although the product itself was good."
            ),
            "detected_topics": ["delivery", "customer support", "product quality"],
        },
    ),
    (
        _object(
            {
                "title": TEXT,
                "estimated_duration_minutes": INTEGER,
                "ingredients": {
                    "type": "array",
                    "items": _object(
                        {
                            "ingredient_name": TEXT,
                            "quantity": NUMBER,
                            "unit_of_measurement": {"enum": ["g", "ml", "piece", "tablespoon"]},
                        }
                    ),
                },
                "preparation_steps": TEXTS,
            }
        ),
        {
            "title": "Tomato soup",
            "estimated_duration_minutes": 35,
            "ingredients": [
                {"ingredient_name": "tomatoes", "quantity": 800, "unit_of_measurement": "g"},
                {"ingredient_name": "onion", "quantity": 1, "unit_of_measurement": "piece"},
                {
                    "ingredient_name": "olive oil",
                    "quantity": 2,
                    "unit_of_measurement": "tablespoon",
                },
                {
                    "ingredient_name": "vegetable stock",
                    "quantity": 400,
                    "unit_of_measurement": "ml",
                },
                {"ingredient_name": "cream", "quantity": 50, "unit_of_measurement": "ml"},
            ],
            "preparation_steps": [
                "Chop the onion and fry it in the oil until it is soft.",
                "Add the tomatoes and the stock and let it simmer for twenty minutes.",
                "Blend the soup, stir in the cream and season it.",
            ],
        },
    ),
    (
        _object(
            {
                "invoice_number": TEXT,
                "issue_date": TEXT,
                "supplier_name": TEXT,
                "net_amount": NUMBER,
                "value_added_tax_rate": NUMBER,
                "gross_amount": NUMBER,
                "payment_due_date": TEXT,
                "international_bank_account_number": TEXT,
            }
        ),
        {
            "invoice_number": "2026-1183",
            "issue_date": "2026-11-03",
            "supplier_name": "Nordwind Elektro GmbH",
            "net_amount": 1820.5,
            "value_added_tax_rate": 0.19,
            "gross_amount": 2166.4,
            "payment_due_date": "2026-12-03",
            "international_bank_account_number": "DE89370400440532013000",
        },
    ),
    (
        _object({"a": INTEGER, "b": INTEGER, "op": {"enum": ["+", "-", "*", "/"]}, "why": TEXT}),
        {
            "a": 12,
            "b": 7,
            "op": "*",
            "why": "The question asks for the product of both numbers, so they are multiplied.",
        },
    ),
]

TOOLS: list[tuple[str, Json, Json]] = [
    (
        "create_calendar_event",
        {
            "event_title": TEXT,
            "start_datetime_iso8601": TEXT,
            "end_datetime_iso8601": TEXT,
            "attendee_email_addresses": TEXTS,
            "send_invitation_notifications": FLAG,
        },
        {
            "event_title": "Budget review",
            "start_datetime_iso8601": "2026-12-01T10:00:00Z",
            "end_datetime_iso8601": "2026-12-01T11:00:00Z",
            "attendee_email_addresses": ["ana@example.com", "li@example.com"],
            "send_invitation_notifications": True,
        },
    ),
    (
        "get_current_weather_conditions",
        {"location_name": TEXT, "temperature_unit": {"enum": ["celsius", "fahrenheit"]}},
        {"location_name": "Zurich", "temperature_unit": "celsius"},
    ),
    (
        "search_knowledge_base_articles",
        {
            "search_query_text": TEXT,
            "maximum_number_of_results": INTEGER,
            "include_archived_articles": FLAG,
        },
        {
            "search_query_text": "reset two-factor authentication",
            "maximum_number_of_results": 5,
            "include_archived_articles": False,
        },
    ),
    (
        "update_customer_subscription_plan",
        {
            "customer_account_identifier": TEXT,
            "new_subscription_plan_name": {"enum": ["basic", "professional", "enterprise"]},
            "effective_date": TEXT,
            "prorate_remaining_balance": FLAG,
        },
        {
            "customer_account_identifier": "acct_81932",
            "new_subscription_plan_name": "professional",
            "effective_date": "2026-12-15",
            "prorate_remaining_balance": True,
        },
    ),
    (
        "bash",
        {"command": TEXT, "description": TEXT},
        {
            "command": 'grep -rn "step_bytes" mlx_server/worker --include=*.py | head -20',
            "description": "Find uses of step_bytes",
        },
    ),
]

QUOTED = [
    (
        (
            '{"flights": [{"flight_number": "LX1612", "departure_airport": "ZRH", '
            '"arrival_airport": "FCO", "departure_time": "2026-12-04T07:15", "price_eur": '
            '184.5}, {"flight_number": "AZ573", "departure_airport": "ZRH", '
            '"arrival_airport": "FCO", "departure_time": "2026-12-04T11:40", "price_eur": '
            '142.0}, {"flight_number": "LX1732", "departure_airport": "ZRH", '
            '"arrival_airport": "FCO", "departure_time": "2026-12-04T17:55", "price_eur": '
            "210.9}]}\n"
            "</tool_response>\n"
            "Which flights are there?"
        ),
        (
            "There are three flights from ZRH to FCO on 2026-12-04:\n"
            "\n"
            "1. **LX1612** departs at 2026-12-04T07:15 and costs 184.5 EUR.\n"
            "2. **AZ573** departs at 2026-12-04T11:40 and costs 142.0 EUR.\n"
            "3. **LX1732** departs at 2026-12-04T17:55 and costs 210.9 EUR.\n"
            "\n"
            "The cheapest one is AZ573 at 142.0 EUR."
        ),
    ),
    (
        (
            "Traceback (most recent call last):\n"
            '  File "/app/worker/queue.py", line 214, in _dispatch\n'
            "    result = handler(payload, timeout=self._timeout_seconds)\n"
            '  File "/app/worker/handlers/invoice.py", line 58, in handle_invoice\n'
            '    total = sum(line["net_amount"] for line in payload["invoice_lines"])\n'
            "KeyError: 'invoice_lines'\n"
            "</tool_response>\n"
            "What went wrong?"
        ),
        (
            "The worker failed in `/app/worker/handlers/invoice.py`, line 58, in "
            "`handle_invoice`:\n"
            "\n"
            "```\n"
            '    total = sum(line["net_amount"] for line in payload["invoice_lines"])\n'
            "KeyError: 'invoice_lines'\n"
            "```\n"
            "\n"
            "The payload that `/app/worker/queue.py` passed to `handler(payload, "
            "timeout=self._timeout_seconds)` has no key `invoice_lines`. Check who sends it, "
            'or use `payload.get("invoice_lines", [])`.'
        ),
    ),
    (
        (
            "total 40\n"
            "-rw-r--r-- 1 root root  4211 Nov 12 09:14 batch_support.py\n"
            "-rw-r--r-- 1 root root 16120 Nov 20 17:02 batch.py\n"
            "-rw-r--r-- 1 root root  1533 Oct 30 11:45 buffer_cache.py\n"
            "-rw-r--r-- 1 root root  5120 Nov 18 08:31 decode_groups.py\n"
            "-rw-r--r-- 1 root root  3380 Nov 02 13:20 read_rate.py\n"
            "</tool_response>\n"
            "List the files with their sizes."
        ),
        (
            "| File | Size |\n"
            "|---|---|\n"
            "| `batch_support.py` | 4211 |\n"
            "| `batch.py` | 16120 |\n"
            "| `buffer_cache.py` | 1533 |\n"
            "| `decode_groups.py` | 5120 |\n"
            "| `read_rate.py` | 3380 |\n"
            "\n"
            "The largest file is `batch.py` with 16120 bytes."
        ),
    ),
    (
        (
            "Article 17. Right to erasure. The data subject shall have the right to obtain "
            "from the controller the erasure of personal data concerning him or her without "
            "undue delay and the controller shall have the obligation to erase personal data "
            "without undue delay where one of the following grounds applies: (a) the "
            "personal data are no longer necessary in relation to the purposes for which "
            "they were collected or otherwise processed; (b) the data subject withdraws "
            "consent on which the processing is based.\n"
            "</tool_response>\n"
            "Quote the first ground and explain it."
        ),
        (
            "The first ground reads:\n"
            "\n"
            "> (a) the personal data are no longer necessary in relation to the purposes for "
            "which they were collected or otherwise processed;\n"
            "\n"
            "In plain words: once the data has served the purpose for which it was "
            "collected, for example when a contract has ended, the controller has the "
            "obligation to erase personal data without undue delay."
        ),
    ),
]
