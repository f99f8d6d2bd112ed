"""Communication between processes: sockets, messages, shared memory, and child processes."""
