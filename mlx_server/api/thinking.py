"""Reasoning effort and thinking budget on the wire, under all their names."""

from typing import Any, Literal

from mlx_server.api.fields import ThinkingTokens, WireModel
from mlx_server.errors import BadRequest

SOME_EFFORT = "medium"
"""The effort of a request that turns thinking on and sets no effort."""


class ThinkingParam(WireModel):
    """Anthropic's `thinking`, which other APIs have adopted."""

    type: Literal["enabled", "adaptive", "auto", "disabled"]
    """The model decides itself how long it thinks, unless there is a budget: the first three are
    the same here."""
    budget_tokens: ThinkingTokens | None = None


class ThinkingBody(WireModel):
    thinking: ThinkingParam | None = None
    enable_thinking: bool | None = None
    """The name that Qwen's own services use."""
    thinking_budget: ThinkingTokens | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def budget(self) -> int | None:
        """The thinking budget in tokens. Raises BadRequest if it is set under two names."""
        found = self.budgets()
        if len(found) > 1:
            one, other, *_ = found
            raise BadRequest(
                f"`{one}` and `{other}` both set the thinking budget: send only one of them.",
                param=other,
            )
        return next(iter(found.values()), None)

    def budgets(self) -> dict[str, int]:
        """The budgets that the client set, by their names."""
        given = {
            "thinking_budget": self.thinking_budget,
            "thinking.budget_tokens": self.thinking.budget_tokens if self.thinking else None,
            "chat_template_kwargs.thinking_budget": self._templates_budget(),
        }
        return {name: budget for name, budget in given.items() if budget is not None}

    def template_kwargs(self, effort: str | None, param: str) -> dict[str, Any]:
        """Variables for the chat template: the effort, the budget and those of the client.

        `param` is the name of the effort in this endpoint's body.
        """
        ours = {"reasoning_effort": self._effort(effort, param), "thinking_budget": self.budget()}
        given = {name: value for name, value in ours.items() if value is not None}
        return {**given, **(self.chat_template_kwargs or {})}

    def param_names(self, effort: str | None, param: str) -> dict[str, str]:
        """The client's names for the variables that `template_kwargs` sets. The arguments are as
        there."""
        own = self.chat_template_kwargs or {}
        sent = {
            "reasoning_effort": param if effort else next(iter(self.switches()), None),
            "thinking_budget": next(iter(self.budgets()), None),
        }
        return {
            f"chat_template_kwargs.{variable}": name
            for variable, name in sent.items()
            if name and variable not in own
        }

    def implied_sampling(self, effort: str | None) -> frozenset[str]:
        """Names of template variables that the client did not ask for: the effort of a request that
        turns thinking on and sets only a budget."""
        explicit = effort or (self.chat_template_kwargs or {}).get("reasoning_effort")
        wants_budget = any(self.switches().values()) and self.budget() is not None
        return frozenset({"reasoning_effort"} if wants_budget and not explicit else ())

    def _templates_budget(self) -> int | None:
        """The budget as templates of Qwen and Seed-OSS name it. Special values of a template, such
        as -1, are not a budget for the engine."""
        budget = (self.chat_template_kwargs or {}).get("thinking_budget")
        return budget if type(budget) is int and 0 <= budget < 2**53 else None

    def _effort(self, effort: str | None, param: str) -> str | None:
        switches = self.switches()
        if not switches:
            return effort
        (switch, is_on), *others = switches.items()
        efforts = {param: effort != "none"} if effort else {}
        for name, wants in [*others, *efforts.items()]:
            if wants != is_on:
                raise BadRequest(
                    f"`{switch}` and `{name}` contradict each other: send only one of them.",
                    param=name,
                )
        return effort or (SOME_EFFORT if is_on else "none")

    def switches(self) -> dict[str, bool]:
        """Whether the client wants thinking, by the names under which it says so."""
        found: dict[str, bool] = {}
        if self.thinking:
            found["thinking.type"] = self.thinking.type != "disabled"
            if not found["thinking.type"] and self.thinking.budget_tokens is not None:
                raise BadRequest(
                    "`thinking.budget_tokens` needs `thinking.type: enabled`.",
                    param="thinking.budget_tokens",
                )
        if self.enable_thinking is not None:
            found["enable_thinking"] = self.enable_thinking
        return found
