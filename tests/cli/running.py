"""What is given to many commands."""

NO_URLS = [
    *("", "their-server", "127.0.0.1:1", "ftp://127.0.0.1", "://", "http://", "file:///etc/hosts"),
    *("http://a:99999", "http://a:-1", "http://a:b", "http://[::1", "http://..", "http://a\nb"),
    *("me:hunter2@host", "http://me:hunter2@host:x", "http://\x1b[31m", f"http://{'a' * 64}"),
    "http://\udcff",
]
"""What is not the URL of a server."""
