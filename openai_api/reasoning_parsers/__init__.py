"""The reasoning parsers. Each has a file in this folder and a line in `registry`."""
