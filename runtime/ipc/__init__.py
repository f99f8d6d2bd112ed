"""Communication between processes: sockets, messages, shared memory, children."""
