"""Methods of quantization: a folder each, with a half for the front and one for the device."""
