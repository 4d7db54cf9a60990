"""Models and adapters by the paths of others."""

# fmt: off

from tests.hostile.corpus.attack import Group, Target, case
from tests.hostile.corpus.making import get, user


def groups(target: Target) -> list[Group]:
    body = {"model": target.model, "messages": user("hi"), "max_tokens": 2}
    return [
        Group(
            case(to="/v1/chat/completions", body=body),
            attacks={
                "no model": case("400 param=model", set={"model": ""}, everywhere=False),
                "a model of null": case("400 param=model", set={"model": None}, everywhere=False),
                "a model of a number": case("400 param=model", set={"model": 5}),
                "a model of a list": case("400 param=model", set={"model": ["x"]}),
                "a model nobody knows": case("404 code=model_not_found", set={"model": "none-such"}),
                "a model's path": case("404 code=model_not_found", set={"model": "/etc/passwd"}),
                "a way up": case("404 code=model_not_found", set={"model": "../../../../etc"}),
                "a way up by backslashes": case("404 code=model_not_found", set={"model": "..\\..\\etc"}),
                "a way up within": case("404 code=model_not_found", set={"model": target.model + "/../tiny"}),
                "an escaped way up": case("404 code=model_not_found", set={"model": "%2e%2e%2fetc"}),
                "a model's URL": case(404, set={"model": "http://169.254.169.254/latest"}),
                "a model's file URL": case(404, set={"model": "file:///etc/passwd"}),
                "a model with a zero": case("404 code=model_not_found", set={"model": target.model + "\x00"}),
                "a model with a line": case("404 code=model_not_found", set={"model": target.model + "\r\nx-evil: 1"}),
                "a model's name of a megabyte": case("404 code=model_not_found", set={"model": "x" * 10**6}),
                "a replay of a file": case(404, set={"model": "replay:/etc/passwd"}),
                "an adapter's path": case("404 code=adapter_not_found", set={"adapter": "/etc"}, everywhere=False),
                "an adapter's way up": case("404 code=adapter_not_found", set={"adapter": "../../etc"}, everywhere=False),
                "an adapter by its own way up": case("404 code=adapter_not_found", set={"adapter": "../adapters/odd"}, everywhere=False),
                "an adapter with a zero": case("404 code=adapter_not_found", set={"adapter": "odd\x00"}, everywhere=False),
                "an adapter of the hub": case("404 code=adapter_not_found", set={"adapter": "someone/something"}, everywhere=False),
                "an adapter of a long path": case("404 code=adapter_not_found", set={"adapter": "adapters/" + "x" * 300}, everywhere=False),
                "an adapter behind the model": case(404, set={"model": target.model + ":../../etc"}, everywhere=False),
                "many adapters behind the model": case(404, set={"model": target.model + ":a:b:c:d"}, everywhere=False),
                "nothing behind the model": case(404, set={"model": target.model + ":"}, everywhere=False),
                "an adapter that is there": case(200, set={"adapter": "odd"}, everywhere=False),
                "an adapter at its loudest": case(200, set={"adapter": "odd", "adapter_scale": 4}, everywhere=False),
                "an adapter that is broken": case("400|404", set={"adapter": "broken"}, everywhere=False),
                "an adapter for a replay": case("400|404", set={"model": "replayed", "adapter": "odd"}, everywhere=False),
                "two adapters": case("200|400|404", set={"adapter": "odd", "adapters": "broken"}, everywhere=False),
                "mlx-lm's adapters": case(404, set={"adapters": "../../../etc"}),
                "a draft model's path": case("200|400|404", set={"draft_model": "../../../etc"}),
            },
        ),
        Group(
            case(to="/v1/models", everywhere=False),
            attacks={
                "a listed way up": case(404, method="GET", to="/v1/models/..%2f..%2fetc%2fpasswd"),
                "a listed path": case(404, method="GET", to="/v1/models//etc/passwd"),
                "a listed zero": case(404, method="GET", to="/v1/models/%00"),
                "a listed name of 10,000 bytes": case(404, send=get("/v1/models/" + "x" * 10000)),
            },
        ),
        # Adapters that clients may load, from folders that the owner named and no others.
        Group(
            case(to="/v1/load_lora_adapter", everywhere=False, body={"model": target.model, "lora_name": "new"}),
            attacks={
                "loading from everywhere": case("400|404", set={"lora_path": "/"}),
                "loading from a way up": case("400|404", set={"lora_path": "../../../../../../etc"}),
                "loading from a file": case("400|404", set={"lora_path": "/etc/passwd"}),
                "loading from a device": case("400|404", set={"lora_path": "/dev/zero"}),
                "loading from this process": case("400|404", set={"lora_path": "/proc/self/root/etc"}),
                "loading from a zero": case("400|404", set={"lora_path": "odd\x00"}),
                "loading from a path of a megabyte": case("400 param=lora_path", set={"lora_path": "x/" * 500_000}),
                "loading from a URL": case("400|404", set={"lora_path": "http://169.254.169.254/"}),
                "loading under a path": case("400|404", set={"lora_name": "../../x", "lora_path": "odd"}),
                "loading under a name of a megabyte": case("400|404", set={"lora_name": "x" * 10**6, "lora_path": "odd"}),
                "loading what is broken": case("400|404", set={"lora_path": "broken"}),
                "loading for nobody": case(404, set={"model": "none", "lora_path": "odd"}),
                "loading for a replay": case("400|404", set={"model": "replayed", "lora_path": "odd"}),
                "unloading what is not there": case(404, to="/v1/unload_lora_adapter"),
                "unloading a way up": case(404, to="/v1/unload_lora_adapter", set={"lora_name": "../../etc"}),
            },
        ),
    ]
