"""The pages of the KV cache, and the prefix tree that finds them; only `manager` changes them."""
