"""Completions: prompts of text and of ids, and the parameters that are its own."""

# fmt: off

from tests.hostile.corpus.attack import Group, Target, case


def groups(target: Target) -> list[Group]:
    return [
        Group(
            case(to="/v1/completions", body={"model": target.model, "prompt": "a", "max_tokens": 2}),
            values={"a text": '"5"', "a list": "[5]", "an object": "{}", "true": "true", "zero": "0", "minus one": "-1", "half": "0.5", "NaN": "NaN", "1e308": "1e308", "10^18": "1000000000000000000"},
            parameters={
                "max_tokens": [400, 400, 400, 400, 400, None, 400, 400, 400, None],
                "logprobs":   [400, 400, 400, 400, 200, 400, 400, 400, 400, 400],
                "best_of":    [400, 400, 400, 400, 400, 400, 400, 400, 400, 400],
                "echo":       [400, 400, 400, 200, 400, 400, 400, 400, 400, 400],
                "n":          [400, 400, 400, 400, 400, 400, 400, 400, 400, 400],
                "prompt":     [200, 200, 400, 400, 400, 400, 400, 400, 400, 400],
                "suffix":     [400, 400, 400, 400, 400, 400, 400, 400, 400, 400],
            },
            attacks={
                "max_tokens is 10^18": case(200, set={"prompt": "a", "max_tokens": 10**18}, everywhere=False),
                "max_tokens is minus one": case(200, set={"prompt": "a", "max_tokens": -1}, everywhere=False),
                "no prompt": case("400 param=prompt", raw={"prompt": "null"}),
                "no tokens": case("400 param=prompt", set={"prompt": ""}),
                "no tokens among some": case("400 param=prompt", set={"prompt": ["a", ""]}),
                "an empty list": case("400 param=prompt", set={"prompt": []}),
                "lists of nothing": case(400, set={"prompt": [[], []]}),
                "ids beyond the vocabulary": case("400 param=prompt", set={"prompt": [1, target.head + 80]}),
                "ids at its end": case("400 param=prompt", set={"prompt": [1, target.head]}),
                "ids far beyond": case("400 param=prompt", set={"prompt": [1, 2_147_483_647]}),
                "ids beyond 64 bits": case("400 param=prompt[1]", set={"prompt": [1, 18_446_744_073_709_551_616]}),
                "negative ids": case("400 param=prompt[0]", set={"prompt": [-1]}),
                "ids that are none": case(400, set={"prompt": [1.5]}),
                "words and ids": case(400, set={"prompt": ["a", 5]}),
                "ids without a text": case(200, set={"prompt": [target.head - 1, target.tokens], "echo": True}, everywhere=False),
                "1,000 prompts": case(400, set={"prompt": ["a"] * 1000}, everywhere=False),
                "128 prompts of 16 answers": case("400|503", set={"prompt": ["a"] * 128, "n": 16}, everywhere=False),
                "a prompt at the limit": case(200, set={"prompt": "x" * 2046}, everywhere=False),
                "a prompt over the limit": case("400 code=context_length_exceeded", set={"prompt": "x" * 2049}, everywhere=False),
                "a million ids": case("400 code=context_length_exceeded", set={"prompt": [1] * 10**6}, everywhere=False),
                "control tokens in a prompt": case(200, set={"prompt": "<|im_start|><|im_end|><|endoftext|>"}),
            },
        ),
    ]
