"""Which experts of a mixture-of-experts model each token used."""
