"""What a template can render is found out by rendering samples."""

import pytest

from mlx_server.prompts.message_normalization import TemplateCapabilities
from mlx_server.prompts.template_capabilities import default_system, template_capabilities
from mlx_server.system.sandbox.chat_template import ChatTemplate

# Templates


TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
EACH = "{% for m in messages %}"
END = "{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ ARGS }}{% endfor %}"
WHOLE = "{{ m.role }}{{ m.content }}" + CALLS.replace("ARGS", "c.function.arguments | tojson")

ASKED: dict[str, tuple[str, TemplateCapabilities]] = {
    "takes everything": (WHOLE, TemplateCapabilities()),
    "leaves calls out": ("{{ m.role }}{{ m.content }}", TemplateCapabilities(calls="never")),
    "writes arguments as they are": (
        "{{ m.content }}" + CALLS.replace("ARGS", "c.function.arguments"),
        TemplateCapabilities(arguments="text"),
    ),
    "joins arguments as text": (
        "{{ m.content }}" + CALLS.replace("ARGS", "'' + c.function.arguments"),
        TemplateCapabilities(arguments="text"),
    ),
    "looks into arguments": (
        "{{ m.content }}" + CALLS.replace("ARGS", "c.function.arguments.items() | list"),
        TemplateCapabilities(arguments="object"),
    ),
    "refuses a second call": (
        "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('') }}{% endif %}"
        + WHOLE,
        TemplateCapabilities(calls="single"),
    ),
    "says calls or text": (
        "{% if m.tool_calls %}" + CALLS.replace("ARGS", "c.function.arguments | tojson") + "{% else"
        " %}{{ m.content }}{% endif %}",
        TemplateCapabilities(text_with_calls="split"),
    ),
    "wants null beside calls": (
        "{% if m.content is none %}"
        + CALLS.replace("ARGS", "c.function.arguments | tojson")
        + "{% else %}{{ m.content }}{% endif %}",
        TemplateCapabilities(text_with_calls="split", empty_content=None),
    ),
    "drops a later system": (
        "{% if m.role != 'system' or loop.first %}" + WHOLE + "{% endif %}",
        TemplateCapabilities(system="first"),
    ),
    "has no system": (
        "{% if m.role == 'system' %}{{ raise_exception('') }}{% endif %}" + WHOLE,
        TemplateCapabilities(system="never"),
    ),
    "has the system at the question": (
        "{% if m.role != 'system' %}{% if loop.last and m.role == 'user' %}"
        "{{ messages[0].content }}{% endif %}" + WHOLE + "{% endif %}",
        TemplateCapabilities(system="question"),
    ),
    "leaves results out": (
        "{% if m.role != 'tool' %}" + WHOLE + "{% endif %}",
        TemplateCapabilities(results="never"),
    ),
    "refuses a result of no call": (
        "{% if m.role == 'tool' and not loop.previtem.tool_calls %}{{ raise_exception('') }}"
        "{% endif %}" + WHOLE,
        TemplateCapabilities(results="answers", calls="single"),
    ),
    "refuses two users": (
        "{% if loop.previtem and m.role == 'user' == loop.previtem.role %}{{ raise_exception('') }}"
        "{% endif %}" + WHOLE,
        TemplateCapabilities(alternates=True),
    ),
    "skips the first turn if it is no user's": (
        "{% if not (loop.first and m.role == 'assistant') %}" + WHOLE + "{% endif %}",
        TemplateCapabilities(user_first=True),
    ),
    "reads reasoning": ("{{ m.reasoning_content }}" + WHOLE, TemplateCapabilities(reasoning="key")),
    "reads thoughts": ("{{ m.thinking }}" + WHOLE, TemplateCapabilities(reasoning="key")),
    "reads parts": (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ p.text }}{{ p.thinking }}{% endfor %}{% endif %}"
        + CALLS.replace("ARGS", "c.function.arguments | tojson"),
        TemplateCapabilities(reasoning="part"),
    ),
    "can't be asked": ("{{ m.name + m.content }}", TemplateCapabilities(shows_user=False)),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_template_is_asked_for_its_manners(name: str) -> None:
    body, expected = ASKED[name]
    assert template_capabilities(ChatTemplate(TOOLS + EACH + body + END), {}) == expected


SAY = EACH + "{{ m.role }}: {{ m.content }}" + END


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (SAY, "never"),
        ("{% if response_format %}Answer in JSON.{% endif %}" + SAY, "never"),
        (
            "{% if response_format %}{{ response_format.json_schema.schema }}{% endif %}" + SAY,
            "response_format",
        ),
        ("{% if json_schema %}{{ json_schema }}{% endif %}" + SAY, "json_schema"),
    ],
)
def test_a_template_may_render_the_schema_itself(source: str, expected: str) -> None:
    assert template_capabilities(ChatTemplate(source), {}).schema == expected


def test_the_system_prompt_of_a_template_that_has_its_own() -> None:
    own = "{% if messages[0].role != 'system' %}<s>Be kind. {{ day }}</s>{% endif %}"
    source = own + EACH + "{% if m.role == 'system' %}<s>{{ m.content }}</s>{% else %}"
    template = ChatTemplate(source + "<u>{{ m.content }}</u>{% endif %}" + END)
    assert default_system(template, {"day": "Monday"}) == "Be kind. Monday"
    assert default_system(ChatTemplate(SAY), {}) == ""
    refusing = "{% if messages | length < 2 %}{{ raise_exception('') }}{% endif %}"
    assert default_system(ChatTemplate(refusing + SAY), {}) == ""
