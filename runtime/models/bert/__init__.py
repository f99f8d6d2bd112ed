"""The BERT family: encoders with learned positions."""
