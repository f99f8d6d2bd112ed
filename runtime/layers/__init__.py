"""What models are built from: linears, norms, embeddings, rotary tables."""
