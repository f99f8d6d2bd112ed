"""The common parts of dense decoders' families."""
