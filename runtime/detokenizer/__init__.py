"""Token ids to text as they come: incremental decoding, stop strings, one process."""
