"""The front's side of the engine: streams, admission and the owner of the child processes."""
