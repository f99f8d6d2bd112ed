"""The parts that families of decoders share: specs, layers and the model."""
