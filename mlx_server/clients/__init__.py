"""Programs and classes that talk to a running server over HTTP."""
