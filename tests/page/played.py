"""What the replay models of these tests say."""

from typing import Any

LONG = "No end of it. " * 200

HOSTILE = """# <script>window.pwned = 1</script>

<img src=x onerror="window.pwned = 1"> <svg onload="window.pwned = 1"></svg>
<iframe srcdoc="<script>parent.pwned = 1</script>"></iframe>
[script](javascript:window.pwned=1) [split](java\tscript:window.pwned=1) [spaces]( javascript:1 )
[data](data:text/html,<script>window.pwned=1</script>)
[relative](/v1/models) [scheme](//evil.test/x)
![picture](https://evil.test/pixel.png) ![inline](data:image/png;base64,AAAA)
<javascript:window.pwned=1> [quote](https://good.example/"onmouseover="window.pwned=1)
[good](https://good.example/path "a title") https://bare.example/x.

| a | <b onclick="window.pwned=1">b</b> |
|---|---|
| `<script>` | [c](vbscript:x) |

```html" onload="window.pwned=1
<script>window.pwned = 1</script>
```

\u202etxt.exe\u202c \u2066isolated\u2069 \u202e
שלום **עולם** [قناة](https://good.example/\u202egnp)
"""
CODE = "So:\n\n```python\nx = '<b>'\n\ty\n```\n"
LINE = "x" * 400 + "[" * 50 + "*a" * 50 + "`" * 51 + ">" * 50

ENTRIES: list[dict[str, Any]] = [
    {
        "match": "What is the weather?",
        "answer": {
            "reasoning": "I should look it up.",
            "text": "Let me see.",
            "calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}],
        },
    },
    {"match": "What is the weather?", "answer": {"text": "It **rains**."}},
    {"match": "And then?", "turn": 2, "output": "The sun."},
    {"match": "slow", "output": LONG, "delay_ms": 20},
    {"match": "Show code", "output": CODE},
    {"match": "hostile", "output": HOSTILE},
    {"match": "line", "output": LINE},
    {
        "match": "hostile call",
        "answer": {
            "reasoning": HOSTILE,
            "calls": [{"name": "get_weather", "arguments": {"city": HOSTILE}}],
        },
    },
    {
        "match": "look it up",
        "answer": {"calls": [{"name": "search", "arguments": {"query": "release"}}]},
    },
    {"match": "look it up", "answer": {"text": "It starts faster."}},
    {"match": "It's \"quoted\" \\ 'text'\n$HOME `x` é🙂", "output": "As you say."},
    {"match": "regex:.", "output": "Hello, *you*."},
]
