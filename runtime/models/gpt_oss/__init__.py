"""gpt-oss."""
