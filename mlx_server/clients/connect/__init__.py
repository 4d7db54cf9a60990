"""Makes clients of other makers use this server: what each needs in its own files."""
