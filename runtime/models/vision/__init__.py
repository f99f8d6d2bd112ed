"""The common code of models that take images: vision towers, their settings, rotary positions."""
