"""The server's use of the operating system: sockets, descriptors, logs, services."""
