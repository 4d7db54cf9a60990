"""Limits on stored responses and conversations."""

from mlx_server.limits.limit import Limit

STORE_BYTES = Limit(
    "stored bytes of all clients",
    8_000_000_000,
    "bytes",
    "server",
    beyond="507: nothing more is stored until something is deleted",
    setting="store.bytes",
)
STORE_BYTES_PER_KEY = Limit(
    "stored bytes of the clients that share a key",
    4_000_000_000,
    "bytes",
    "key",
    beyond="507: nothing more is stored until something is deleted",
    setting="store.bytes_per_key",
)
STORED_PIECE_BYTES = Limit(
    "one stored item, one event, or one response without its output",
    64 << 20,
    "bytes",
    "request",
    beyond="413",
)
STORE_CALLS = Limit("calls queued for the store's thread", 256, "items", "server", beyond="503")
STORE_CALL_BYTES = Limit(
    "bytes of the calls queued for the store's thread", 128 << 20, "bytes", "server", "503"
)
CONVERSATION_ITEMS = Limit("items of a conversation", 10_000, "items", "conversation", beyond="400")
PAGE_BYTES = Limit(
    "a page of items, or of events of a resumed stream; a larger item gets a page of its own",
    4 << 20,
    "bytes",
    "request",
    beyond="the page is shorter, with `has_more`",
)
CHAIN_RESPONSES = Limit(
    "responses before `previous_response_id`", 10_000, "items", "request", beyond="400"
)
READ_BACK_ITEMS = Limit(
    "stored items to which `previous_response_id` or `conversation` refers",
    20_000,
    "items",
    "request",
    beyond="413",
)
ITEM_REFERENCES = Limit("items referred to by id", 1000, "items", "request", beyond="400")
STORED_RESPONSES = Limit(
    "stored responses, and as many conversations and chat completions",
    10_000,
    "items",
    "server",
    beyond="the oldest is deleted",
    setting="store.count",
)
