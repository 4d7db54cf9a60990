"""Chat templates run in a process of their own: they are programs that somebody else wrote."""
