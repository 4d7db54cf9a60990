"""Configures other vendors' clients, by the settings files of each, to use this server."""
