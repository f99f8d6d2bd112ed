"""Extra output: hidden states after the last norm, of every token or of the last one."""
