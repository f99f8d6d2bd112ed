"""What the APIs and the engine mean by their calls; no HTTP, front-safe."""
