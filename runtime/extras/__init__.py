"""What requests may ask for beside tokens: one folder each, with a front and a device half."""
