"""Drafts of a row's next tokens, and the gate that decides how many of them a pass computes."""
