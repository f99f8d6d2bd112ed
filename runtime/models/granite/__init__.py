"""The Granite family: Granite 3, and Granite 4 with or without Mamba 2 layers."""
