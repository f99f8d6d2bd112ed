"""The tool-call parsers. Each has a file in this folder and a line in `registry`."""
