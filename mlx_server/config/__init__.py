"""models.yaml, flags and environment variables as frozen settings."""
