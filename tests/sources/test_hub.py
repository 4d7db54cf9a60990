"""Models and adapters of the hub, which is a server of our own on localhost here, or a folder."""

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
import tokenizers
from huggingface_hub import get_session

from mlx_server import limits
from mlx_server.errors import ModelUnusable, SettingsError
from mlx_server.sources import demo
from mlx_server.sources.hub import check_answers
from mlx_server.sources.source import on_disk, resolve
from tests.live.fork_server import call_in_child
from tests.sources.resolving import resolved
from tests.tables import cases

CHECKPOINT = ["config.json", "tokenizer.json", "model.safetensors"]


BODY = b"{}" * 500


BODIES = {
    "config.json": json.dumps({"model_type": "llama"}).encode(),
    "tokenizer.json": tokenizers.Tokenizer(tokenizers.models.BPE()).to_str().encode(),
    "tokenizer_config.json": b"{}",
}
"""Of the files that are looked at before weights are fetched; others have the same one."""


def nothing(what: str, done: int, total: int) -> None: ...


def put(folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(BODIES.get(name, BODY))
    return folder


def test_a_local_checkpoint_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put(tmp_path / "models" / "mine", CHECKPOINT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    # models/mine has the form of a hub id too; what is here goes first
    for source in (str(folder), "models/mine", "./models/mine", "~/models/mine"):
        assert resolve(source, nothing) == folder.resolve()


@pytest.mark.parametrize("missing", CHECKPOINT)
def test_what_a_local_folder_lacks_is_named(tmp_path: Path, missing: str) -> None:
    folder = put(tmp_path / "mine", [name for name in CHECKPOINT if name != missing])
    with pytest.raises(ModelUnusable, match=r"mlx_lm\.convert") as caught:
        resolve(str(folder), nothing)
    assert missing.replace("model", "model*") in caught.value.message
    assert sum(name in caught.value.message for name in CHECKPOINT) <= 1


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-q4.gguf"])
def test_weights_that_no_converter_reads_are_not_to_be_converted(tmp_path: Path, name: str) -> None:
    folder = put(tmp_path / "mine", ["config.json", "tokenizer.json", name])
    for source, says in ((folder, f"{name} is not read: use a"), (folder / name, "is a file")):
        with pytest.raises(ModelUnusable, match=says) as caught:
            resolve(str(source), nothing)
        assert "safetensors" in caught.value.message
        assert "mlx_lm.convert" not in caught.value.message


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="put its folder in adapters/, and serve its base"):
        resolve(str(put(tmp_path / "mine", ["adapter_config.json"])), nothing)


@pytest.mark.parametrize(
    "source", ["/no/such/folder", "./missing", "~/missing", "~nobody/x", "missing", "a/b/c", "x\0"]
)
def test_a_folder_that_is_not_there(source: str) -> None:
    with pytest.raises(ModelUnusable, match=r"The folder '.*' does not exist"):
        resolve(source, nothing)


@pytest.mark.parametrize(
    "source", ["", "s3:bucket", "ollama:llama3", "demo:", "demo:gpt5", "hf:", "hf:name", "hf:a/b/c"]
)
def test_an_unknown_kind_is_a_settings_error(source: str) -> None:
    with pytest.raises(SettingsError):
        resolve(source, nothing)


def test_what_is_on_disk_is_told_without_fetching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SERVER_CACHE", str(tmp_path / "cache"))
    folder = put(tmp_path / "mine", CHECKPOINT)
    assert on_disk(str(folder)) == folder.resolve()
    for source in ("demo:smollm2", "demo:other", "org/a--b", str(tmp_path / "nowhere")):
        assert on_disk(source) is None
    made = put(tmp_path / "cache" / "demo" / f"smollm2-{demo.FORMAT}", list(demo.FILES))
    assert on_disk("demo:smollm2") == made
    assert on_disk("demo:other") is None


COMMIT = "0123456789abcdef0123456789abcdef01234567"

STATUSES = {"broken": 500, "busy": 429, "private": 401}
"""By the names of repositories whose owner is org."""


class Hub(BaseHTTPRequestHandler):
    """A commit, its file list, the files."""

    files: ClassVar[list[str]] = []
    asked: ClassVar[list[str]] = []
    bodies: ClassVar[dict[str, bytes]] = {}
    """In place of those that files have by themselves."""
    sizes: ClassVar[dict[str, int]] = {}
    """That the list tells, where a file is not as large."""
    names: ClassVar[dict[str, str]] = {}
    """That the hub gives to contents, by file, where they differ from the file's own; and to the
    commit, under "sha" in the list and "commit" with each file."""
    cut_off: ClassVar[set[str]] = set()
    """Files of which the connection brings a half, once."""
    endless: ClassVar[set[str]] = set()
    """Files that are sent over and over, without a length."""
    next_page: ClassVar[str] = ""
    """The path of each list's next page, which is the same list again."""
    refused: ClassVar[int | None] = None
    """The status in place of any file, where it needs a token."""
    ranges: ClassVar[list[str]] = []
    revisions: ClassVar[tuple[str, ...]] = ("main", "v2")
    pauses: ClassVar[dict[str, str]] = {}
    """The headers that ask the client to wait."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.asked.append(path if self.command == "GET" else f"HEAD {path}")
        revision = path.removeprefix("/api/models/org/name/revision/")
        if revision in (*self.revisions, COMMIT):
            self.answer(
                json.dumps({"id": "org/name", "sha": self.names.get("sha", COMMIT)}).encode()
            )
        elif path.startswith("/api/models/org/name/revision/"):
            self.answer(b"", status=404, code="RevisionNotFound")
        elif path == "/api/models/org/name/refs":
            refs = [{"name": n, "ref": n, "targetCommit": COMMIT} for n in self.revisions]
            self.answer(json.dumps({"branches": refs, "tags": [], "converts": []}).encode())
        elif path == "/api/models":
            self.answer(json.dumps([{"id": "org/name"}, {"id": "org/other"}]).encode())
        elif path in (f"/api/models/org/name/tree/{COMMIT}", self.next_page):
            self.answer(json.dumps([self.listed(name) for name in self.files]).encode())
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            self.send(path.rpartition("/")[2])
        elif status := STATUSES.get(path.split("/")[-3]):
            self.answer(b"", status=status)
        elif path.startswith("/api/models/org/gated/"):
            self.answer(b"", status=403, code="GatedRepo")
        else:
            self.answer(b"", status=404, code="RepoNotFound")

    do_HEAD = do_GET

    def listed(self, name: str) -> dict[str, Any]:
        size = self.sizes.get(name, len(self.body(name)))
        listed = {"type": "file", "path": name, "size": size, "oid": name}
        is_next = urlsplit(self.path).path == self.next_page
        if content := self.names.get("lfs on the next page" if is_next else "lfs"):
            listed["lfs"] = {"oid": content, "size": size, "pointerSize": 1}
        return listed

    def body(self, name: str) -> bytes:
        return self.bodies.get(name, BODIES.get(name, BODY))

    def send(self, name: str) -> None:
        body = self.body(name)
        if self.refused and self.headers["Authorization"] != "Bearer good":
            self.answer(b"", status=self.refused, code="GatedRepo" if self.refused == 403 else "")
        elif self.command == "GET" and name in self.cut_off:
            self.cut_off.remove(name)
            self.answer(body, etag=name, sent=len(body) // 2)
        elif (begins := self.headers["Range"]) and self.command == "GET":
            self.ranges.append(begins)
            start = int(begins.removeprefix("bytes=").partition("-")[0])
            self.answer(body[start:], 206, name, span=f"bytes {start}-{len(body) - 1}/{len(body)}")
        elif name in self.endless and self.command == "GET":
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            with suppress(OSError):
                while True:
                    self.wfile.write(bytes(1 << 20))
        else:
            self.answer(body, etag=name)

    def answer(
        self,
        body: bytes,
        status: int = 200,
        etag: str = "-",
        code: str = "",
        span: str = "",
        sent: int | None = None,
    ) -> None:
        self.send_response(status)
        size = self.sizes.get(etag, len(body)) if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(size))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{self.names.get(etag, etag)}"')
        self.send_header("X-Repo-Commit", self.names.get("commit", COMMIT))
        if self.next_page:
            self.send_header("Link", f'<http://{self.headers["Host"]}{self.next_page}>; rel="next"')
        for name, pause in self.pauses.items():
            self.send_header(name, pause)
        if code:
            self.send_header("X-Error-Code", code)
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:sent])
        self.close_connection = sent is not None

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving_hub() -> Iterator[ThreadingHTTPServer]:
    Hub.files, Hub.asked, Hub.ranges = [], [], []
    Hub.bodies, Hub.sizes, Hub.cut_off, Hub.refused = {}, {}, set(), None
    Hub.names, Hub.endless, Hub.next_page, Hub.pauses = {}, set(), "", {}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


pytestmark = pytest.mark.slow


def cached(home: Path, names: list[str]) -> Path:
    """`org/name` as the hub client keeps it, without the file list that only new ones write."""
    repository = home / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return put(repository / "snapshots" / COMMIT, names)


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    with serving_hub() as hub:
        yield hub


def resolve_in_child(
    source: str,
    home: Path,
    hub: ThreadingHTTPServer | None = None,
    function: str = "resolve",
    options: dict[str, Any] | None = None,
    **environment: str,
) -> dict[str, Any]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    place = f"http://127.0.0.1:{hub.server_port}" if hub else "http://127.0.0.1:1"
    own = {"HF_HOME": str(home), "HF_ENDPOINT": place, "NO_PROXY": "*", **environment}
    lowered = {name: int(value) for name, value in own.items() if hasattr(limits, name)}
    return call_in_child(
        resolved, source, function, options or {}, lowered, environment={**kept, **own}
    )


def test_a_download_brings_what_is_needed_and_no_code(
    tmp_path: Path, hub: ThreadingHTTPServer
) -> None:
    wanted = [*CHECKPOINT, "chat_template.jinja", "merges.txt", "tokenizer.model"]
    wanted.append("additional_chat_templates/tool_use.jinja")
    unwanted = ["modeling.py", "pytorch_model.bin", "original/params.json", "x.gguf", "x.pkl"]
    unwanted += ["assets/config.json", "additional_chat_templates/x.py", "onnx/chat.jinja"]
    Hub.files = wanted + unwanted
    answer = resolve_in_child("org/name", tmp_path, hub)
    folder = Path(answer["folder"])
    fetched = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert sorted(map(str, fetched)) == sorted(wanted)
    assert (folder / "model.safetensors").read_bytes() == BODY
    assert not any(name in path for path in Hub.asked for name in unwanted)

    # the small files were there before the weights were begun with
    assert answer["reports"][-1] == ["downloading org/name", len(BODY), len(BODY)]
    assert all(0 < done <= total for _, done, total in answer["reports"])
    assert answer["quiet"] is True
    assert answer["heavy"] == []


def test_what_is_cached_is_taken_without_a_request(
    tmp_path: Path, hub: ThreadingHTTPServer
) -> None:
    folder = cached(tmp_path, CHECKPOINT)
    for source in ("org/name", "hf:org/name"):
        assert resolve_in_child(source, tmp_path, hub)["folder"] == str(folder)
    assert resolve_in_child("org/name", tmp_path, HF_HUB_OFFLINE="1")["folder"] == str(folder)
    assert Hub.asked == []


def test_half_a_download_is_finished(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    folder = cached(tmp_path, CHECKPOINT[:2])
    Hub.files = CHECKPOINT
    assert resolve_in_child("org/name", tmp_path, hub)["folder"] == str(folder)
    assert (folder / "model.safetensors").is_file()


def test_offline_and_not_cached(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    answer = resolve_in_child("org/name", tmp_path, hub, HF_HUB_OFFLINE="1")
    assert answer["error"] == "ModelUnusable"
    assert "HF_HUB_OFFLINE is set" in answer["message"]
    assert "hf download org/name" in answer["message"]
    assert Hub.asked == []


def test_offline_and_half_cached(tmp_path: Path) -> None:
    cached(tmp_path, CHECKPOINT[:2])
    answer = resolve_in_child("org/name", tmp_path, HF_HUB_OFFLINE="1")
    assert answer["error"] == "ModelUnusable"
    assert "model*.safetensors" in answer["message"]
    assert "HF_HUB_OFFLINE" in answer["message"]


REFUSED = {
    "org/gated": "Accept its terms on https://huggingface.co/org/gated",
    "org/unknown": "Check the spelling",
    "org/nam": "(similar names: org/name)",
    "org/broken": "the hub can't be reached (HfHubHTTPError: Server error '500",
    "org/busy": "rate limit is reached",
    "org/private": "Set HF_TOKEN",
    "org/two--dashes": "try again",
}


def test_what_the_hub_refuses_comes_with_what_to_do(
    tmp_path: Path, hub: ThreadingHTTPServer
) -> None:
    answers = resolve_in_child(" ".join(REFUSED), tmp_path, hub, "each")["answers"]
    for answer, fix in zip(answers, REFUSED.values(), strict=True):
        assert answer["error"] == "ModelUnusable"
        assert fix in answer["message"]


def test_a_repository_without_mlx_weights(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    Hub.files = ["config.json", "tokenizer.json", "pytorch_model.bin"]
    answer = resolve_in_child("org/name", tmp_path, hub)
    assert answer["error"] == "ModelUnusable"
    assert "has no model*.safetensors" in answer["message"]
    assert "mlx-community" in answer["message"]
    assert nothing_heavy_was_asked()


def nothing_heavy_was_asked() -> bool:
    weights = [path for path in Hub.asked if path.endswith(".safetensors")]
    return all(path.startswith("HEAD ") for path in weights)


@pytest.mark.parametrize(
    ("file", "body", "says"),
    [
        ("config.json", b'{"model_type": "deepseek_v4"}', "its model type 'deepseek_v4'"),
        ("config.json", b'{"model_type": "glm4v_moe"}', "Update mlx-server and mlx-lm"),
        ("config.json", b'{"model_type": "phi4mm"}', "choose another model"),
        ("config.json", b'{"model_type": "../llama"}', "'../llama'"),
        ("config.json", b'{"model_type": "llama", "model_file": "x.py"}', "mlx-server never runs"),
        ("config.json", b"{", "config.json is not valid JSON"),
        ("tokenizer.json", b"{}", "tokenizer.json of this model can't be read"),
    ],
)
def test_what_small_files_speak_against_is_not_fetched(
    tmp_path: Path, hub: ThreadingHTTPServer, file: str, body: bytes, says: str
) -> None:
    Hub.files, Hub.bodies = CHECKPOINT, {file: body}
    answer = resolve_in_child("org/name", tmp_path, hub)
    assert answer["error"] == "ModelUnusable"
    assert says in answer["message"]
    assert nothing_heavy_was_asked()


def test_what_is_over_the_budget_is_not_fetched(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    Hub.files, Hub.sizes = CHECKPOINT, {"model.safetensors": 62_300_000_000}
    answer = resolve_in_child("org/name", tmp_path, hub, options={"budget": 16_000_000_000})
    assert answer["error"] == "NotEnoughMemory"
    assert "take 62.3 GB, and the memory budget is 16.0 GB" in answer["message"]
    assert "`memory_budget`" in answer["message"]
    assert "`mlx-server doctor` says where" in answer["message"]
    assert nothing_heavy_was_asked()


def test_what_is_larger_than_the_disk_is_not_fetched(
    tmp_path: Path, hub: ThreadingHTTPServer
) -> None:
    Hub.files, Hub.sizes = CHECKPOINT, {"model.safetensors": 1 << 60}
    answer = resolve_in_child("org/name", tmp_path, hub)
    assert answer["error"] == "ModelUnusable"
    assert "Free some space, or set HF_HOME" in answer["message"]
    assert nothing_heavy_was_asked()


def test_a_revision_is_fetched_and_found_again(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    Hub.files = CHECKPOINT
    answer = resolve_in_child("org/name", tmp_path, hub, options={"revision": "v2"})
    assert Path(answer["folder"]).name == COMMIT
    assert "/api/models/org/name/revision/v2" in Hub.asked
    assert "/api/models/org/name/revision/main" not in Hub.asked
    Hub.asked.clear()
    again = resolve_in_child("org/name", tmp_path, hub, options={"revision": "v2"})
    assert (again["folder"], Hub.asked) == (answer["folder"], [])


def test_a_revision_that_is_not_there(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    Hub.files = CHECKPOINT
    answer = resolve_in_child("org/name", tmp_path, hub, options={"revision": "v3"})
    assert answer["error"] == "ModelUnusable"
    assert "no revision 'v3'" in answer["message"]
    assert "such as main, v2" in answer["message"]


def test_a_gate_is_met_before_the_weights(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    Hub.files, Hub.refused = CHECKPOINT, 403
    answer = resolve_in_child("org/name", tmp_path, hub)
    assert "Accept its terms on https://huggingface.co/org/name" in answer["message"]
    assert "HF_TOKEN" in answer["message"]
    assert nothing_heavy_was_asked()
    assert "folder" in resolve_in_child("org/name", tmp_path, hub, HF_TOKEN="good")


def test_a_download_goes_on_where_it_was_cut_off(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    weights = bytes(range(256)) * 100_000  # more than the client takes at once
    Hub.files, Hub.bodies = CHECKPOINT, {"model.safetensors": weights}
    Hub.cut_off = {"model.safetensors"}
    folder = Path(resolve_in_child("org/name", tmp_path, hub)["folder"])
    assert (folder / "model.safetensors").read_bytes() == weights
    (begun,) = Hub.ranges
    assert 0 < int(begun.removeprefix("bytes=").rstrip("-").partition("-")[0]) <= len(weights) // 2


@cases
def test_names_that_lead_out_of_the_cache_are_refused(
    tmp_path: Path, hub: ThreadingHTTPServer, named: str, name: str
) -> None:
    """The hub client makes paths of the names of commits and contents."""
    Hub.files, Hub.names = CHECKPOINT, {named: name.format(tmp_path)}
    answer = resolve_in_child("org/name", tmp_path, hub)
    assert answer["error"] == "ModelUnusable"
    assert "which leads out of the cache" in answer["message"]
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("escaped")]


@pytest.mark.parametrize("file", ["1/../../../../x.json", "/x.json"])
def test_files_outside_of_the_repository_are_refused(
    tmp_path: Path, hub: ThreadingHTTPServer, file: str
) -> None:
    Hub.files = [*CHECKPOINT, file]
    resolve_in_child("org/name", tmp_path, hub)
    assert {path.name for path in tmp_path.rglob("*.json")} <= {*CHECKPOINT, f"{COMMIT}.json"}


LOWERED: dict[str, Any] = {"SMALL_FILES_BYTES": "1000000"}
ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("files", "function", "error"),
    [(CHECKPOINT, "resolve", "ModelUnusable"), (ADAPTER, "resolve_adapter", "AdapterInvalid")],
)
@pytest.mark.parametrize("ending", [".json", ".safetensors"])
def test_a_file_without_end_is_not_fetched_to_the_end(
    tmp_path: Path,
    hub: ThreadingHTTPServer,
    files: list[str],
    function: str,
    error: str,
    ending: str,
) -> None:
    Hub.files, Hub.endless = files, {next(name for name in files if name.endswith(ending))}
    answer = resolve_in_child("org/name", tmp_path, hub, function, **LOWERED)
    assert answer["error"] == error
    assert "The hub sends " in answer["message"]


@pytest.mark.parametrize(
    ("file", "files", "function"),
    [("x.txt", CHECKPOINT, "resolve"), (ADAPTER[0], ADAPTER, "resolve_adapter")],
)
def test_small_files_that_are_large_are_not_fetched(
    tmp_path: Path, hub: ThreadingHTTPServer, file: str, files: list[str], function: str
) -> None:
    Hub.files, Hub.bodies = sorted({*files, file}), {file: bytes(30_000_000)}
    answer = resolve_in_child("org/name", tmp_path, hub, function, **LOWERED)
    assert "The hub sends 30.0 MB, and these files may have 1.0 MB" in answer["message"]


@pytest.mark.parametrize(
    ("function", "error"), [("resolve", "ModelUnusable"), ("resolve_adapter", "AdapterInvalid")]
)
def test_a_list_without_end_is_not_read_to_the_end(
    tmp_path: Path, hub: ThreadingHTTPServer, function: str, error: str
) -> None:
    Hub.files, Hub.next_page = [f"{number}.json" for number in range(10_000)], "/next"
    lowered: dict[str, Any] = {"HUB_LIST_BYTES": str(2 << 20)}
    answer = resolve_in_child("org/name", tmp_path, hub, function, **lowered)
    assert answer["error"] == error
    assert "says more than 2 MiB about one repository" in answer["message"]


def test_a_further_page_of_a_list_is_checked_too(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    """Wherever the hub says that it is."""
    Hub.files, Hub.next_page = CHECKPOINT, "/next"
    Hub.names = {"lfs on the next page": "../../../escaped"}
    answer = resolve_in_child("org/name", tmp_path, hub)
    assert "which leads out of the cache" in answer["message"]


@pytest.mark.parametrize(
    ("name", "pause", "is_kept"),
    [
        ("Retry-After", str(limits.HUB_PAUSE_SECONDS), True),
        ("Retry-After", str(limits.HUB_PAUSE_SECONDS + 1), False),
        ("Retry-After", "9" * 5000, False),
        ("Retry-After", "Fri, 31 Dec 9999 23:59:59 GMT", False),
        ("RateLimit", '"api";r=0;t=5', True),
        ("RateLimit", '"api";r=0;t=99999', False),
    ],
)
def test_no_hub_has_its_client_wait_for_long(
    hub: ThreadingHTTPServer, name: str, pause: str, is_kept: bool
) -> None:
    Hub.pauses = {name: pause}
    check_answers()
    response = get_session().get(f"http://127.0.0.1:{hub.server_port}/org/busy/resolve/x")
    assert response.status_code == 429
    assert (name in response.headers) == is_kept


def test_a_hub_that_says_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        answer = resolve_in_child(
            "org/name",
            tmp_path,
            HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}",
            HF_HUB_DOWNLOAD_TIMEOUT="1",
        )
    assert answer["error"] == "ModelUnusable"
    assert "Check the network" in answer["message"]


def test_a_disk_that_becomes_full(tmp_path: Path) -> None:
    """The error is named as what it is, wherever the hub client meets it."""
    from mlx_server.sources import hub as hub_module

    full = OSError(errno.ENOSPC, "No space left on device")
    assert "is full. Free some space" in hub_module._fix(hub_module.HubModel("org/name"), full)


def test_an_adapter_comes_without_what_it_was_trained_with(
    tmp_path: Path, hub: ThreadingHTTPServer
) -> None:
    Hub.files = [*ADAPTER, "optimizer.pt", "adapter_model.bin", "tokenizer.json"]
    answer = resolve_in_child("org/name", tmp_path, hub, "resolve_adapter")
    folder = Path(answer["folder"])
    assert sorted(path.name for path in folder.iterdir()) == sorted(ADAPTER)
    assert answer["heavy"] == []
    Hub.asked.clear()
    again = resolve_in_child("hf:org/name", tmp_path, hub, "resolve_adapter")
    assert (again["folder"], Hub.asked) == (answer["folder"], [])


def test_half_an_adapter_is_finished(tmp_path: Path, hub: ThreadingHTTPServer) -> None:
    folder = cached(tmp_path, ADAPTER[:1])
    Hub.files = ADAPTER
    answer = resolve_in_child("org/name", tmp_path, hub, "resolve_adapter")
    assert answer["folder"] == str(folder)
    assert (folder / ADAPTER[1]).is_file()


def test_an_adapter_that_cannot_be_had_is_no_adapter(
    tmp_path: Path, hub: ThreadingHTTPServer
) -> None:
    answer = resolve_in_child("org/unknown", tmp_path, hub, "resolve_adapter")
    assert answer["error"] == "AdapterInvalid"
    assert "Check the spelling" in answer["message"]
