"""The gpt-oss family: experts with biases, and attention with sinks."""
