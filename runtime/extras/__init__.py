"""What requests may ask for beside tokens: a folder each, with a front and a device half."""
