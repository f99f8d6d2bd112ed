"""What crosses processes: sockets, messages, shared memory, children."""
