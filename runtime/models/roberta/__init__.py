"""The RoBERTa family: RoBERTa and XLM-RoBERTa."""
