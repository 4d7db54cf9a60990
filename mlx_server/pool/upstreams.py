"""The pool's records of upstream models, which other servers run."""

from dataclasses import dataclass, replace

from mlx_server.families.base import ModelFamily
from mlx_server.parsers.reasoning_tags import pairs_of
from mlx_server.pool.prepare import Capabilities, ModelSpec
from mlx_server.upstream.connection import UpstreamConnection
from mlx_server.upstream.limited_thoughts import ThoughtTags
from mlx_server.upstream.spec import UpstreamCapabilities, UpstreamSpec
from mlx_server.upstream.text_families import opening_of_reasoning, text_family, thought_tags


@dataclass(frozen=True)
class UpstreamModel:
    spec: ModelSpec
    upstream: UpstreamSpec
    connection: UpstreamConnection
    text_family: ModelFamily
    """The family by which its text is parsed if the other server has tool calling."""
    opening: str
    """The delimiter that opens reasoning in its text; empty if a family has none."""
    thoughts: ThoughtTags | None
    """The tags by which two requests can limit its reasoning; None if its family has none."""

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def can(self) -> UpstreamCapabilities:
        return self.connection.capabilities

    @property
    def family(self) -> ModelFamily:
        """The family by which its text is parsed."""
        return self.text_family if self.can.tools else self.text_family.with_tools_in_prompt()

    @property
    def context_length(self) -> int | None:
        return self.spec.context_length or self.connection.learnt.context_length

    @property
    def capabilities(self) -> Capabilities:
        """What clients see of the model. What is not known of it is taken to be possible."""
        return Capabilities(
            family=self.spec.family or self.family.name,
            architecture="",
            quantization=None,
            size_bytes=0,
            context_length=self.context_length,
            reasoning=True,
            tools=True,
            structured_output=True,
        )


def upstream_model(spec: ModelSpec) -> UpstreamModel | None:
    """The upstream model of this entry; None for a model that this server runs. Raises
    SettingsError for an unknown family."""
    if spec.upstream is None:
        return None
    family = text_family(spec.family)
    if spec.reasoning_tags is not None:
        family = replace(family, reasoning_tags=pairs_of(spec.reasoning_tags))
    return UpstreamModel(
        spec=spec,
        upstream=spec.upstream,
        connection=UpstreamConnection(spec.id, spec.upstream),
        text_family=family,
        opening=opening_of_reasoning(spec.family),
        thoughts=thought_tags(spec.family),
    )
