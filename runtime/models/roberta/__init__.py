"""RoBERTa and XLM-RoBERTa."""
