"""Reads the messages of servers, for both transports.

Servers that cut a text within an emoji write half of a surrogate pair as an escape. The SDK refuses
the whole message for it, and the call would never end; here the half becomes U+FFFD.
"""

import json
import re
from typing import Any

from mcp.types import JSONRPCMessage, jsonrpc_message_adapter

LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class MessageAdapter:
    def validate_json(self, data: str | bytes, **options: Any) -> JSONRPCMessage:
        """Raises ValueError for what is not a message."""
        try:
            return jsonrpc_message_adapter.validate_json(data, **options)
        except ValueError as error:
            try:
                text = json.dumps(json.loads(data), ensure_ascii=False)
            except (ValueError, RecursionError):
                raise error from None
            whole = LONE_SURROGATE.sub("\ufffd", text)
            if whole == text:
                raise
        return jsonrpc_message_adapter.validate_json(whole, **options)


MESSAGES = MessageAdapter()
