"""The common code of models that take images: towers, their configuration, images' positions."""
