"""The Granite family: Granite 3 and 4 without recurrent layers."""
