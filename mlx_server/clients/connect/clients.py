"""The clients, one record each: their files, environment and command.

File formats are those of each client's documentation. `scripts/conformance` runs the clients that
have a `tested` version, after `mlx-server connect --write` or with the environment alone."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NAME = "mlx-server"
"""The name of this server in the clients' files."""

CONTEXT, OUTPUT = "{context as a number}", "{output as a number}"
"""Placeholders that a number replaces, where `{context}` would give a string of its digits."""

PLACEHOLDER = re.compile(r"\{(?:url|key|model|context)\}")

ANSWER_SHARE = 4
"""An answer may take one part in this many of the context. Clients compact a conversation before it
fills the rest."""


@dataclass(frozen=True)
class Connection:
    """The values of one server in a client's settings."""

    url: str
    """The base URL without `/v1`."""
    key: str
    model: str
    context: int
    """The model's context length in tokens."""

    @property
    def output(self) -> int:
        return self.context // ANSWER_SHARE


def filled(template: Any, connection: Connection) -> Any:
    if isinstance(template, Mapping):
        return {
            filled(name, connection): filled(value, connection) for name, value in template.items()
        }
    if isinstance(template, list | tuple):
        return [filled(value, connection) for value in template]
    if template in (CONTEXT, OUTPUT):
        return connection.context if template == CONTEXT else connection.output
    if not isinstance(template, str):
        return template
    values = {
        "{url}": connection.url,
        "{key}": connection.key,
        "{model}": connection.model,
        "{context}": str(connection.context),
    }
    # in one pass: a value may contain a placeholder's text
    return PLACEHOLDER.sub(lambda found: values[found[0]], template)


Format = Literal["json", "yaml", "toml"]


@dataclass(frozen=True)
class ClientFile:
    path: str
    format: Format
    content: Any
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the file must have. They are added where they are missing; a value that the user
    has set stays."""


@dataclass(frozen=True)
class ClientRecord:
    title: str
    files: tuple[ClientFile, ...]
    command: tuple[str, ...]
    """The command that starts the client, after its `files` are written."""
    environment: Mapping[str, str] = field(default_factory=dict)
    starts_without_files: bool = False
    """Whether the client can be started with `environment` alone, without its `files`."""
    note: str = ""
    tested: str = ""
    """The client's version that `scripts/conformance` runs; empty if it does not run it."""


KEY_VARIABLE = "MLX_SERVER_API_KEY"
V1 = "{url}/v1"

CLAUDE = {
    "ANTHROPIC_BASE_URL": "{url}",
    "ANTHROPIC_AUTH_TOKEN": "{key}",
    "ANTHROPIC_MODEL": "{model}",
    "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
    "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
    "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "{context}",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
CLINE_PROVIDER = "openai-compatible"
LLM_FOLDER = (
    "~/Library/Application Support/io.datasette.llm"
    if sys.platform == "darwin"
    else "~/.config/io.datasette.llm"
)

CLIENTS: Mapping[str, ClientRecord] = {
    "codex": ClientRecord(
        title="Codex",
        files=(
            ClientFile(
                f"~/.codex/{NAME}.config.toml",
                "toml",
                {
                    "model": "{model}",
                    "model_provider": NAME,
                    "model_context_window": CONTEXT,
                    "model_providers": {
                        NAME: {
                            "name": NAME,
                            "base_url": V1,
                            "wire_api": "responses",
                            "experimental_bearer_token": "{key}",
                        }
                    },
                },
            ),
        ),
        command=("codex", "--profile", NAME),
        note="The file is a profile of its own: Codex without `--profile` stays as it is.",
        tested="0.169.0",
    ),
    "claude": ClientRecord(
        title="Claude Code",
        files=(ClientFile("~/.claude/settings.json", "json", {"env": CLAUDE}),),
        command=("claude",),
        environment=CLAUDE,
        starts_without_files=True,
        note="With `--run` alone only this one session uses the server.",
        tested="2.1.332",
    ),
    "opencode": ClientRecord(
        title="opencode",
        files=(
            ClientFile(
                "~/.config/opencode/opencode.json",
                "json",
                {
                    "provider": {
                        NAME: {
                            "npm": "@ai-sdk/openai-compatible",
                            "name": NAME,
                            "options": {"baseURL": V1, "apiKey": "{key}"},
                            "models": {
                                "{model}": {
                                    "name": "{model}",
                                    "limit": {"context": CONTEXT, "output": OUTPUT},
                                }
                            },
                        }
                    },
                    "model": f"{NAME}/{{model}}",
                },
                {"$schema": "https://opencode.ai/config.json"},
            ),
        ),
        command=("opencode",),
        tested="1.18.33",
    ),
    "qwen-code": ClientRecord(
        title="Qwen Code",
        files=(
            ClientFile(
                "~/.qwen/settings.json",
                "json",
                {
                    "modelProviders": {
                        "openai": [
                            {
                                "id": "{model}",
                                "name": f"{{model}} ({NAME})",
                                "envKey": KEY_VARIABLE,
                                "baseUrl": V1,
                                "generationConfig": {"contextWindowSize": CONTEXT},
                            }
                        ]
                    },
                    "env": {KEY_VARIABLE: "{key}"},
                    "security": {"auth": {"selectedType": "openai"}},
                    "model": {"name": "{model}"},
                },
            ),
        ),
        command=("qwen",),
        tested="0.24.4",
    ),
    "continue": ClientRecord(
        title="Continue",
        files=(
            ClientFile(
                "~/.continue/config.yaml",
                "yaml",
                {
                    "models": [
                        {
                            "name": NAME,
                            "provider": "openai",
                            "model": "{model}",
                            "apiBase": V1,
                            "apiKey": "{key}",
                            "roles": ["chat", "edit", "apply"],
                            "capabilities": ["tool_use"],
                            "defaultCompletionOptions": {"contextLength": CONTEXT},
                        }
                    ]
                },
                {"name": "Local", "version": "1.0.0", "schema": "v1"},
            ),
        ),
        command=("cn",),
        tested="1.5.47",
    ),
    "cline": ClientRecord(
        title="Cline",
        files=(
            ClientFile(
                "~/.cline/data/settings/providers.json",
                "json",
                {
                    "version": 1,
                    "lastUsedProvider": CLINE_PROVIDER,
                    "providers": {
                        CLINE_PROVIDER: {
                            "settings": {
                                "provider": CLINE_PROVIDER,
                                "apiKey": "{key}",
                                "baseUrl": V1,
                                "model": "{model}",
                                "contextWindow": CONTEXT,
                            },
                            "updatedAt": "2026-01-01T00:00:00.000Z",
                            "tokenSource": "manual",
                        }
                    },
                },
                {"modes": {}},
            ),
        ),
        command=("cline",),
        tested="3.0.65",
    ),
    "aider": ClientRecord(
        title="aider",
        files=(
            ClientFile(
                "~/.aider.conf.yml",
                "yaml",
                {
                    "model": "openai/{model}",
                    "openai-api-base": V1,
                    "openai-api-key": "{key}",
                },
            ),
            ClientFile(
                "~/.aider.model.metadata.json",
                "json",
                {
                    "openai/{model}": {
                        "max_input_tokens": CONTEXT,
                        "max_output_tokens": OUTPUT,
                        "input_cost_per_token": 0,
                        "output_cost_per_token": 0,
                        "litellm_provider": "openai",
                        "mode": "chat",
                    }
                },
            ),
        ),
        command=("aider",),
        tested="0.86.2",
    ),
    "pi": ClientRecord(
        title="pi",
        files=(
            ClientFile(
                "~/.pi/agent/models.json",
                "json",
                {
                    "providers": {
                        NAME: {
                            "baseUrl": V1,
                            "api": "openai-completions",
                            "apiKey": "{key}",
                            "models": [
                                {
                                    "id": "{model}",
                                    "contextWindow": CONTEXT,
                                    "maxTokens": OUTPUT,
                                }
                            ],
                        }
                    }
                },
            ),
        ),
        command=("pi", "--provider", NAME, "--model", "{model}"),
        tested="1.3.0",
    ),
    "zed": ClientRecord(
        title="Zed",
        files=(
            ClientFile(
                "~/.config/zed/settings.json",
                "json",
                {
                    "language_models": {
                        "openai_compatible": {
                            NAME: {
                                "api_url": V1,
                                "available_models": [
                                    {
                                        "name": "{model}",
                                        "display_name": "{model}",
                                        "max_tokens": CONTEXT,
                                        "max_output_tokens": OUTPUT,
                                    }
                                ],
                            }
                        }
                    },
                    "agent": {"default_model": {"provider": NAME, "model": "{model}"}},
                },
            ),
        ),
        command=("zed",),
        environment={KEY_VARIABLE: "{key}"},
        note="Zed reads the key from its environment, or asks for it in the agent's settings.",
    ),
    "llm": ClientRecord(
        title="llm",
        files=(
            ClientFile(
                f"{LLM_FOLDER}/extra-openai-models.yaml",
                "yaml",
                [
                    {
                        "model_id": NAME,
                        "model_name": "{model}",
                        "api_base": V1,
                        "headers": {"Authorization": "Bearer {key}"},
                        "supports_tools": True,
                        "supports_schema": True,
                    }
                ],
            ),
        ),
        command=("llm", "chat", "-m", NAME),
        note="llm has no setting for the length of the context.",
        tested="0.36",
    ),
    "goose": ClientRecord(
        title="goose",
        files=(
            ClientFile(
                "~/.config/goose/custom_providers/mlx_server.json",
                "json",
                {
                    "name": "mlx_server",
                    "engine": "openai",
                    "display_name": NAME,
                    "description": "Models on this machine",
                    "api_key_env": KEY_VARIABLE,
                    "base_url": f"{V1}/chat/completions",
                    "models": [{"name": "{model}", "context_limit": CONTEXT}],
                    "supports_streaming": True,
                },
            ),
        ),
        command=("goose", "session"),
        environment={
            "GOOSE_PROVIDER": "mlx_server",
            "GOOSE_MODEL": "{model}",
            KEY_VARIABLE: "{key}",
        },
        note="goose reads the key and its provider from the environment; older releases need "
        "`reasoning_field: reasoning_content` in the server's models.yaml.",
    ),
}
