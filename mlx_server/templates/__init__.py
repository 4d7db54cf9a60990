"""Renders chat templates in a separate process, since they are programs from third parties."""
