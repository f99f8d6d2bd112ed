"""What models that take images share: towers, their configuration, the places of images."""
