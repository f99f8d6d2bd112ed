"""ModernBERT."""
