"""The Cohere 2 family: Command R7B and Command A."""
