"""What a request may say: sampling parameters and their checks. Front-safe."""
