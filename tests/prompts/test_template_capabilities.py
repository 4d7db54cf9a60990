"""What a template can render is found out by rendering samples."""

from typing import Any

import msgspec

from mlx_server.prompts.message_normalization import TemplateCapabilities
from mlx_server.prompts.template_capabilities import default_system, template_capabilities
from mlx_server.system.sandbox.chat_template import ChatTemplate
from tests.tables import cases

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
EACH = "{% for m in messages %}"
END = "{% endfor %}"


@cases
def test_a_template_is_asked_for_its_manners(body: str, capabilities: dict[str, Any]) -> None:
    expected = msgspec.convert(capabilities, TemplateCapabilities)
    assert template_capabilities(ChatTemplate(TOOLS + EACH + body + END), {}) == expected


SAY = EACH + "{{ m.role }}: {{ m.content }}" + END


@cases
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
