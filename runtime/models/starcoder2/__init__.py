"""The Starcoder 2 family: LayerNorms, biases, and an MLP without a gate."""
