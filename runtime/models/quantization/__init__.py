"""Methods of quantization: a folder for each, with a front half and a device half."""
