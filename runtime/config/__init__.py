"""Options, and the tables of names that options choose from. Front-safe."""
