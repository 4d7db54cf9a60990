"""What the server asks of the operating system."""
