"""The page at `/`: its files, and the data that only it shows."""
