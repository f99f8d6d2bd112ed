"""The Nemotron-H family: decoders whose layers are Mamba 2, attention or an MLP."""
