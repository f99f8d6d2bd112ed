"""The Phi-3 family: Phi-3, Phi-3.5, Phi-4 and Phi-4-mini."""
