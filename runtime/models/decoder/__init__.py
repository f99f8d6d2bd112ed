"""Dense decoders: what families of them share."""
