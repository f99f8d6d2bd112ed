"""From a step's logits to its tokens."""
