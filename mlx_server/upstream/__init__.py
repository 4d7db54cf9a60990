"""Models that are served elsewhere: what is sent to their servers, and how answers are read."""
