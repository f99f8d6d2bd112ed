"""What a model folder says, read without torch: configuration, tokenizer files, tensor headers."""
