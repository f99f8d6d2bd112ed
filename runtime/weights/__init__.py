"""Weights: from files, from trainers, while serving."""
