"""What an answer has to be, asked for by someone who wants it never to be found."""

# fmt: off

from tests.hostile.corpus.attack import Group, Target, case
from tests.hostile.corpus.making import deep, keyed, nested, numbered, user


def groups(target: Target) -> list[Group]:
    body = {"model": target.model, "messages": user("hi"), "max_tokens": 2}
    return [
        Group(
            case(to="/v1/chat/completions", body=body, everywhere=False),
            attacks={
                "a remote schema": case("400 code=invalid_json_schema", set={"guided_json": {"$ref": "http://169.254.169.254/latest"}}),
                "a schema in a file": case("400 code=invalid_json_schema", set={"guided_json": {"$ref": "file:///etc/passwd"}}),
                "a schema of itself": case("400 code=invalid_json_schema", set={"guided_json": {"$ref": "#"}}),
                "schemas of each other": case("400 code=invalid_json_schema", set={"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}}),
                "a list of itself": case(200, set={"guided_json": {"type": "array", "items": {"$ref": "#"}}}),
                "a schema that is not there": case("400 code=invalid_json_schema", set={"guided_json": {"$ref": "#/$defs/none"}}),
                "references that lead back": case("400 code=invalid_json_schema", set={"guided_json": {"$ref": "#/$defs/0", "$defs": {"0": {"allOf": [{"$ref": "#/$defs/1"}, {"$ref": "#/$defs/1"}]}, "1": {"allOf": [{"$ref": "#/$defs/2"}, {"$ref": "#/$defs/2"}]}, "2": {"allOf": [{"$ref": "#/$defs/1"}, {"$ref": "#/$defs/1"}]}}}}),
                "a catastrophic pattern": case("200|400", set={"guided_regex": "^(a+)+$"}),
                "another catastrophic pattern": case("200|400", set={"guided_regex": "(x+x+)+y"}),
                "a pattern of a million": case("200|400", set={"guided_regex": "(a{1000}){1000}"}),
                "patterns in patterns": case("200|400", set={"guided_regex": "(((a{1,99}){1,99}){1,99}){1,99}"}),
                "a pattern that is open": case(400, set={"guided_regex": "("}),
                "a pattern that looks back": case(400, set={"guided_regex": "(?<=a)b\\1"}),
                "a pattern of nothing": case(400, set={"guided_regex": ""}),
                "a pattern of a megabyte": case(400, set={"guided_regex": "x" * 10**6}),
                "a pattern within a schema": case("200|400", set={"guided_json": {"type": "string", "pattern": "^(a|b|c)*a(a|b){400}$"}}),
                "a constant of 10 MiB": case("400 code=context_length_exceeded", set={"guided_json": {"const": "x" * 10_485_760}}),
                "the schema's text of 10 MiB": case(400, set={"guided_json": "x" * 10_485_760}),
                "10^6 items": case("400 code=invalid_json_schema", set={"guided_json": {"type": "array", "minItems": 10**6}}),
                "10^18 characters": case("400 code=invalid_json_schema", set={"guided_json": {"type": "string", "minLength": 10**18}}),
                "items of less than none": case("400 code=invalid_json_schema", set={"guided_json": {"type": "array", "minItems": -5}}),
                "more items than fit": case("200|400", set={"guided_json": {"type": "array", "minItems": 9, "maxItems": 3}}),
                "nested 64 deep": case("200|400", set={"guided_json": deep({"items": "#"}, {}, 60)}),
                "nested in two ways": case("200|400", set={"guided_json": deep({"allOf": ["#", {"type": "object"}]}, {}, 28)}),
                "nested too deep": case("400 code=invalid_json", raw={"guided_json": nested('{"items":', "{}", "}", 100_000)}),
                "an enum of 10^5": case("400 code=invalid_json_schema", set={"guided_json": {"enum": numbered("v#", 100_000)}}),
                "an enum of nothing": case("400 code=invalid_json_schema", set={"guided_json": {"enum": []}}),
                "a choice of 10^5": case(400, set={"guided_choice": numbered("v#", 100_000)}),
                "a choice of nothing": case(400, set={"guided_choice": []}),
                "a choice of no words": case("200|400", set={"guided_choice": [""]}),
                "a choice of control tokens": case("200|400", set={"guided_choice": ["<|im_end|>"]}),
                "10^5 properties": case(400, set={"guided_json": {"properties": keyed("k#", {}, 100_000)}}),
                "a schema that nothing meets": case("200|400", set={"guided_json": {"not": {}}}),
                "a schema of nonsense": case("400 code=invalid_json_schema", set={"guided_json": {"type": "wizard"}}),
                "a type of a number": case("400 code=invalid_json_schema", set={"guided_json": {"type": 5}}),
                "a multiple of nothing": case("400 code=invalid_json_schema", set={"guided_json": {"multipleOf": 0}}),
                "a multiple of next to nothing": case("400 code=invalid_json_schema", set={"guided_json": {"type": "number", "multipleOf": 1e-300}}),
                "no grammar": case("200|400", set={"guided_grammar": "start: "}),
                "a grammar without a start": case(400, set={"guided_grammar": 'x: "y"'}),
                "a grammar of itself": case("200|400", set={"guided_grammar": "start: start"}),
                "a grammar of many ways": case("200|400", set={"guided_grammar": 'start: a\na: a a | b a | "x" |\nb: a b | a'}),
                "brackets without end": case(400, set={"guided_grammar": "start: " + "(" * 50000 + '"a"' + ")" * 50000}),
                "a grammar that brings another": case(400, set={"guided_grammar": 'start: "a"\n%import common.WORD\n%include "/etc/passwd"'}),
                "a grammar and a pattern": case(400, set={"guided_grammar": 'start: "a"', "guided_regex": "a"}),
                "a format of all kinds": case(400, set={"structured_outputs": {"json": {}, "regex": "a", "choice": ["a"]}}),
                "a structural tag": case(400, set={"structured_outputs": {"structural_tag": "{}"}}),
            },
        ),
        Group(
            case(to="/v1/chat/completions", body=body),
            attacks={
                "a format of no kind": case(400, set={"response_format": {"type": "wizard"}}),
                "a schema of null": case(400, set={"response_format": {"type": "json_schema", "json_schema": None}}),
                "a remote schema, as OpenAI spells it": case("400 code=invalid_json_schema param=response_format.json_schema.schema", set={"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://169.254.169.254/"}}}}),
                "a schema of itself, as OpenAI spells it": case("400 code=invalid_json_schema", set={"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}}),
                "a schema's name of 10 KiB": case(400, set={"response_format": {"type": "json_schema", "json_schema": {"name": "x" * 10240, "schema": {}}}}),
            },
        ),
    ]
