"""The front's side of the engine: streams, admission, control calls and the choice of a replica."""
