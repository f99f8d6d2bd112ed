"""The OLMo 3 family: OLMo 2 with a window on most layers."""
