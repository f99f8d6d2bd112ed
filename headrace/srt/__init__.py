"""Names that users' programs import from the reference's package of the same name."""
