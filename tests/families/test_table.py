"""Which family a checkpoint belongs to."""

import io
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mlx_server.errors import SettingsError
from mlx_server.families import FAMILIES, family_of
from mlx_server.families.hermes import PLAIN, SMOLLM2
from mlx_server.families.literal_families import LLAMA3
from mlx_server.families.markup import MarkupFamily
from mlx_server.families.table import markdown, rows, show
from mlx_server.models.checkpoint import Checkpoint, read_checkpoint
from mlx_server.parsers.markup_parser import MarkupLayout
from mlx_server.sandbox.chat_template import ChatTemplate
from mlx_server.tool_parsers.json_calls import marked_json
from tests.families import byte_level, checkpoint


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Checkpoint:
    return read_checkpoint(demo_path)


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("unknown"), byte_level(), "{{ messages }}")


def test_every_family_has_a_name_of_its_own() -> None:
    names = [family.name for family in FAMILIES]
    assert sorted(set(names)) == sorted(names)
    assert {"plain", "smollm2"} <= set(names)


def test_the_demo_model_is_known_by_type_and_template(demo: Checkpoint) -> None:
    assert family_of(demo) is SMOLLM2


@pytest.mark.parametrize("mark", SMOLLM2.template_markers)
def test_a_template_that_lacks_a_mark_is_of_another_family(demo: Checkpoint, mark: str) -> None:
    assert demo.template
    other = ChatTemplate(demo.template.source.replace(mark, "other"))
    assert family_of(replace(demo, template=other)) is LLAMA3
    assert family_of(replace(demo, template=None)) is LLAMA3


def test_the_template_alone_does_not_make_a_family(demo: Checkpoint) -> None:
    assert family_of(replace(demo, model_type="mamba")) is PLAIN


def test_the_checkpoints_name_does_not_make_a_family(demo: Checkpoint) -> None:
    assert family_of(replace(demo, path=Path("/models/gpt-oss-20b"))) is SMOLLM2


@pytest.mark.parametrize(
    ("model_type", "template", "family"),
    [
        ("apertus", "", "apertus"),
        ("mistral", "[BEGIN FINAL RESPONSE]", "apriel"),
        ("jamba", "<tool_calls>", "jamba"),
        ("hunyuan_v1_dense", "<tool_calls>", "hunyuan"),
        ("internlm3", "", "internlm"),
        ("deepseek_v3", "<|role_sep|> function call", "gigachat"),
        ("deepseek_v3", "｜GCML｜", "gigachat35"),
        ("minimax_m3", "", "minimax_m3"),
        ("minicpm3", "<|tool_call_start|>", "minicpm"),
        ("llama", "<function name= <param name=", "minicpm5"),
        ("step3", "", "step3"),
        ("cohere", "Action: ```json", "command_r"),
        ("cohere", "", "command"),
        ("llama", ">>>all", "functionary"),
        ("llama", "<|from|> <|recipient|> <|content|>", "functionary_v2"),
        ("mistral", "<|from|> <|recipient|> <|content|>", "functionary_v2"),
        ("ernie4_5_moe", "<tool_call>", "ernie4_5"),
        ("solar_open", "", "solar_open"),
        ("solar_open2", "", "solar_open2"),
        ("hy_v3", "", "hy3"),
        ("plamo3", "", "plamo"),
        ("anything", "<atem:function_calls>", "muse"),
        ("anything", "<|content_invoke_tool_json|>", "inkling"),
        ("anything", "<ifm|tool_calls>", "k2_horizon"),
        ("anything", "[unused11]", "pangu"),
        ("dots1", "<dots_function_call>", "dots"),
        ("gpt_bigcode", "<function_call>", "granite_code"),
        ("longcat_flash", "", "longcat"),
        ("llama", "", "llama3"),
        ("llama", "<|python_tag|>", "llama3"),
        ("llama", "<|im_start|> SmolLM", "smollm2"),
        ("llama", "<tool_call>", "hermes"),
        ("llama", "<TOOLCALL>", "nemotron"),
        ("llama", "<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("qwen2", "<tool_call>", "qwen3"),
        ("qwen2", "<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("qwen3", "<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("qwen3_moe", "<tool_call>", "qwen3"),
        ("qwen3_moe", "<tool_call> <function= <parameter=", "qwen3_coder"),
        ("qwen3_next", "<tool_call>", "qwen3"),
        ("mistral", "[TOOL_CALLS]", "mistral"),
        ("mistral", "<tool_call>", "hermes"),
        ("phi3", "<|tool_call|>", "phi4"),
        ("glm4_moe", "<tool_call> <arg_key>", "glm4_5"),
        ("granitemoehybrid", "<tool_call>", "granite"),
        ("smollm3", "<tool_call>", "smollm3"),
        ("nemotron-nas", "<TOOLCALL>", "nemotron"),
        ("nemotron_h", "<TOOLCALL>", "nemotron"),
        ("nemotron_h", "<tool_call> <function= <parameter=", "nemotron3"),
        ("mamba", "<tool_call>", "plain"),
    ],
)
def test_what_the_template_shows_outweighs_the_type(
    unknown: Checkpoint, model_type: str, template: str, family: str
) -> None:
    found = replace(unknown, model_type=model_type, template=ChatTemplate(template))
    assert family_of(found).name == family


def test_no_family_is_hidden_by_one_that_asks_for_the_same() -> None:
    asked = [(type, f.template_markers) for f in FAMILIES for type in f.model_types]
    assert sorted(set(asked)) == sorted(asked)


def test_the_readme_has_the_table() -> None:
    """`mlx-server models --families --markdown` prints it."""
    readme = (Path(__file__).parents[2] / "mlx_server/families/README.md").read_text("utf-8")
    found = re.search(r"<!-- families[^>]*-->\n(.*?)<!-- /families -->", readme, re.DOTALL)
    assert found
    assert found[1] == markdown()


def test_every_family_has_a_line_in_the_table() -> None:
    assert [name for name, *_ in rows()] == [family.name for family in FAMILIES]


def test_a_line_of_the_table() -> None:
    layout = MarkupLayout((("<a|>\n", "<b>"),), (marked_json("<c>", "</c>"), marked_json("<d>")))
    family = MarkupFamily("x", layout, model_types=("t",), template_markers=("m",))
    assert rows([family]) == [("x", ["t"], ["m"], ["<a|>…<b>"], ["<c>…</c>", "<d>…"])]
    own = MarkupFamily("y", shapes=("r", "c"))
    assert rows([own, MarkupFamily("z")]) == [
        ("y", [], [], ["r"], ["c"]),
        ("z", [], [], [], []),
    ]


def test_a_bar_does_not_end_a_cell() -> None:
    assert "`<\\|role_sep\\|>`" in markdown()
    assert {line.replace("\\|", "").count("|") for line in markdown().splitlines()} == {4}


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_on_a_terminal_and_in_a_pipe(terminal: bool) -> None:
    file = io.StringIO()
    show(Console(file=file, force_terminal=terminal, width=100, color_system=None))
    lines = file.getvalue().splitlines()
    assert (len(lines) == len(FAMILIES) + 1) is not terminal
    assert any("[TOOL_CALLS]…" in line for line in lines)


def test_an_unknown_type_is_plain_and_said_so(
    unknown: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert family_of(unknown) is PLAIN
    assert "'tiny' belongs to no known family" in caplog.text


def test_a_known_type_needs_no_word(demo: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        family_of(demo)
    assert caplog.text == ""


def test_the_owner_settles_it(demo: Checkpoint, unknown: Checkpoint) -> None:
    assert family_of(demo, "plain") is PLAIN
    assert family_of(unknown, "smollm2") is SMOLLM2


@pytest.mark.parametrize("name", ["", "Plain", "gpt"])
def test_a_family_that_there_is_not(demo: Checkpoint, name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        family_of(demo, name)
    for family in FAMILIES:
        assert family.name in caught.value.message
