"""Bodies that are not JSON, or that two parsers would read in two ways."""

# fmt: off

from tests.hostile.corpus.attack import Group, Target, case
from tests.hostile.corpus.making import keyed, nested, user


def groups(target: Target) -> list[Group]:
    body = {"model": target.model, "messages": user("hi"), "max_tokens": 2}
    return [
        Group(
            case(to="/v1/chat/completions", body=body),
            attacks={
                "no UTF-8": case("400 code=invalid_json", bytes=bytes.fromhex("7b226d6f64656c223a2022ff227d")),
                "an overlong character": case("400 code=invalid_json", bytes=bytes.fromhex("7b2261223a22c0af227d")),
                "UTF-16": case("400 code=invalid_json", bytes='{"model": "x"}'.encode("utf-16")),
                "UTF-32": case("400 code=invalid_json", bytes='{"model": "x"}'.encode("utf-32")),
                "a mark before": case("400 code=invalid_json", bytes='{"model": "x"}'.encode("utf-8-sig")),
                "nothing": case("400 code=invalid_json", bytes=""),
                "white space": case("400 code=invalid_json", bytes=" " * 1000),
                "16 MiB of white space": case("400 code=invalid_json", bytes="\n" * 16_777_216),
                "a zero": case("400 code=invalid_json", bytes="\x00"),
                "a zero behind": case("400 code=invalid_json", bytes="{}\x00"),
                "a list": case("400 code=invalid_json", bytes="[]"),
                "a number": case("400 code=invalid_json", bytes="5"),
                "a text": case("400 code=invalid_json", bytes='"x"'),
                "null": case("400 code=invalid_json", bytes="null"),
                "half a body": case("400 code=invalid_json", bytes='{"model": "x"'),
                "two bodies": case("400 code=invalid_json", bytes='{"model": "x"}{"model": "x"}'),
                "a comment": case("400 code=invalid_json", bytes="{/* */}"),
                "a comma too many": case("400 code=invalid_json", bytes='{"model": "x",}'),
                "single quotes": case("400 code=invalid_json", bytes="{'model': 'x'}"),
                "a number with a plus": case("400 code=invalid_json", raw={"seed": "+1"}),
                "a number with a zero before": case("400 code=invalid_json", raw={"seed": "01"}),
                "a number in hexadecimal": case("400 code=invalid_json", raw={"seed": "0x1"}),
                "a line break in a text": case("400 code=invalid_json", raw={"user": '"\n"'}),
                "a zero in a text": case("400 code=invalid_json", raw={"user": '"\x00"'}),
                "an escaped zero": case(200, raw={"user": '"\\u0000"'}),
                "half a character": case(200, raw={"user": '"\\ud800"'}),
                "its other half": case(200, raw={"user": '"\\udc00"'}),
                "halves the wrong way round": case(200, raw={"user": '"\\udc00\\ud800"'}),
                "half a character as a key": case(200, raw={"user": '{"\\ud800": 1}'}),
                "an escape of no number": case("400 code=invalid_json", raw={"user": '"\\uzzzz"'}),
                "a depth": case("400 code=invalid_json", bytes="[" * 100_000),
                "a depth of 10 million": case("400 code=invalid_json", bytes="[" * 10**7),
                "a depth of objects": case("400 code=invalid_json", bytes='{"a":' * 10**6),
                "a deep object": case("400 code=invalid_json", raw={"metadata": nested('{"a":', "1", "}", 1000)}),
                "a depth in a text": case(200, set={"user": "[" * 1000}),
                "depth for a template": case(200, raw={"chat_template_kwargs": nested('{"a":', "1", "}", 60)}),
                "a key twice": case("400 code=invalid_json", bytes='{"model": "' + target.model + '", "model": "other"}'),
                "a key twice by an escape": case("400 code=invalid_json", bytes='{"model": "' + target.model + '", "mod\\u0065l": "other"}'),
                "a million of one key": case("400 code=invalid_json", bytes="{" + '"a":1,' * 10**6 + '"a":1}'),
                "100,000 keys": case("200|400", set={"metadata": keyed("key#", 1, 100_000)}),
                "100,000 parameters": case(200, raw=keyed("key#", "1", 100_000)),
                "a name of a megabyte": case(200, set={"x" * 10**6: 1}),
                "names that break lines": case(200, set={"a\r\nx-evil: 1": 1, "\x00": 1}),
                "a number of 400 digits": case(200, raw={"max_completion_tokens": "9" * 399}, everywhere=False),
                "a number of 10,000 digits": case("400 code=invalid_json", raw={"max_tokens": "9" * 10000}),
                "a number of a million digits": case("400 code=invalid_json", raw={"max_tokens": "9" * 10**6}),
                "a fraction of a million digits": case("200|400", raw={"temperature": "0." + "9" * 10**6}),
                "an exponent without end": case("400 code=invalid_json", raw={"temperature": "1e999"}),
                "an exponent of a million digits": case("400 code=invalid_json", raw={"temperature": "1e" + "9" * 10**6}),
                "the least exponent": case(200, raw={"temperature": "1e-999999999"}),
                "16 MiB of zeros": case(400, bytes='{"a": [' + "0," * 8_000_000 + "0]}"),
                "16 MiB of escapes": case(400, bytes='{"a": "' + "\\u0000" * 2_700_000 + '"}'),
            },
        ),
    ]
