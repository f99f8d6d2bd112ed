"""The Mixtral family."""
